//! Cuts text into the pieces that are merged on their own.

use regex::Regex;

/// The vocabulary's own pattern (Kimi K3 release, tokenizer), except that its lookahead alternative `\s+(?!\S)` is
/// left out, because `regex` has none: [`Splitter::piece_end`] does that one by hand.
const PATTERN: &str = concat!(
    // Matching a slice from its start keeps every search one forward pass, however the text is made.
    r"\A(?:",
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+",
    r")",
);

/// The compiled pattern.
pub(crate) struct Splitter(Regex);

impl Splitter {
    pub(crate) fn new() -> Self {
        Splitter(Regex::new(PATTERN).expect("the pattern is a constant that compiles"))
    }

    /// The pieces of `text` in order; joined they are `text`.
    pub(crate) fn pieces<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (piece, tail) = rest.split_at(self.piece_end(rest));
            rest = tail;
            Some(piece)
        })
    }

    /// Length of the first piece of `text`, which is not empty.
    fn piece_end(&self, text: &str) -> usize {
        let end = self
            .0
            .find(text)
            .expect("letters, numbers, whitespace and the rest cover every character")
            .end();
        let mut last_first = text[..end].chars().rev();
        let last = last_first.next().expect("no alternative matches nothing");
        // Only `\s+` can end in whitespace that is not a line end. It took the whole run, so what follows, if anything,
        // is not whitespace and `\s+(?!\S)` would have given back one character, if that left it any.
        let is_space_run = last.is_whitespace() && last != '\r' && last != '\n';
        if is_space_run && end < text.len() && last_first.next().is_some() {
            return end - last.len_utf8();
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_starts_a_piece() {
        let splitter = Splitter::new();
        for c in '\0'..=char::MAX {
            let mut buffer = [0; 4];
            let text: &str = c.encode_utf8(&mut buffer);
            assert_eq!(splitter.piece_end(text), text.len(), "{c:?}");
        }
    }

    #[test]
    fn pieces_follow_the_pattern() {
        let cases: [(&str, &[&str]); 14] = [
            ("Hello world", &["Hello", " world"]),
            ("a   b", &["a", "  ", " b"]),
            ("a  1", &["a", " ", " ", "1"]),
            ("a \n b", &["a", " \n", " b"]),
            ("a \n  ", &["a", " \n", "  "]),
            ("a\u{3000}\u{2028}\u{a0}?", &["a", "\u{3000}\u{2028}", "\u{a0}", "?"]),
            ("a\t", &["a", "\t"]),
            ("12345", &["123", "45"]),
            ("don't DON'T", &["don't", " DON'T"]),
            ("it'\u{17f}a", &["it'\u{17f}", "a"]),
            ("中文abc", &["中文", "abc"]),
            ("HTTPServer", &["HTTPServer"]),
            ("aB", &["a", "B"]),
            ("x = {\r\n}", &["x", " =", " {\r\n", "}"]),
        ];
        let splitter = Splitter::new();
        for (text, pieces) in cases {
            assert_eq!(splitter.pieces(text).collect::<Vec<_>>(), pieces, "{text:?}");
        }
    }
}
