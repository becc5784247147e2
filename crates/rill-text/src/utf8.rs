//! Token bytes to text, a token at a time.

/// Turns bytes that arrive in any portions into text without ever emitting half a character.
///
/// Everything returned, joined, equals `String::from_utf8_lossy` of everything pushed.
#[derive(Debug, Default)]
pub struct Utf8Stream {
    /// Start of a character whose end has not come yet: at most three bytes between calls.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// A stream that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes and returns the text they complete, malformed parts as U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.pending.len());
        let mut held_bytes = 0;
        let mut seen = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            seen += chunk.valid().len() + invalid.len();
            if seen == self.pending.len() && can_still_complete(invalid) {
                held_bytes = invalid.len();
            } else if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..self.pending.len() - held_bytes);
        text
    }

    /// Ends the text: U+FFFD if a character was left unfinished, else nothing. The stream can be used afresh.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// Whether `bytes` are the start of a character and only lack its end.
fn can_still_complete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_character_split_over_tokens_comes_out_whole() {
        let mut stream = Utf8Stream::new();
        let bytes = "é😀".as_bytes();
        let steps: Vec<String> = bytes.iter().map(|b| stream.push(&[*b])).collect();
        assert_eq!(steps, ["", "é", "", "", "", "😀"]);
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn an_impossible_continuation_is_replaced_at_once() {
        let mut stream = Utf8Stream::new();
        assert_eq!(stream.push(b"\xe2\x82"), "");
        assert_eq!(stream.push(b"a\xff"), "\u{fffd}a\u{fffd}");
        assert_eq!(stream.push(b"\xf0\x9f"), "");
        assert_eq!(stream.finish(), "\u{fffd}");
        assert_eq!(stream.push(b"b"), "b");
    }

    /// Bytes in which whole, cut and impossible sequences are all common.
    fn mixed_bytes() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            any::<char>().prop_map(|c| {
                let mut bytes = c.to_string().into_bytes();
                bytes.pop();
                bytes
            }),
            any::<Vec<u8>>(),
            proptest::sample::select(vec![
                0x80u8, 0xbf, 0xc0, 0xe0, 0xed, 0xa0, 0xf0, 0x90, 0xf4, 0xf5, 0xff
            ])
            .prop_map(|b| vec![b]),
        ];
        proptest::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn any_split_reads_as_the_whole(bytes in mixed_bytes(), step_bytes in 1usize..7) {
            let mut stream = Utf8Stream::new();
            let mut text = String::new();
            let mut seen = 0;
            for chunk in bytes.chunks(step_bytes) {
                text.push_str(&stream.push(chunk));
                seen += chunk.len();
                // What is out so far is what any continuation would start with.
                let whole = String::from_utf8_lossy(&bytes[..seen]).into_owned();
                prop_assert!(whole.starts_with(&text));
                prop_assert!(whole.len() - text.len() <= 3);
            }
            text.push_str(&stream.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
