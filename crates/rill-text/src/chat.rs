//! Prompts for one question, and which part of a reply each generated token belongs to.

use std::sync::Arc;

use crate::{TextError, Tokenizer};

/// How a model wants conversations written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChatFormat {
    /// Kimi K3: elements between `<|open|>`, `<|sep|>` and `<|close|>`, messages closed by `<|end_of_msg|>`.
    Xtml,
    /// Kimi-Linear: turns between `<|im_user|>`, `<|im_assistant|>`, `<|im_middle|>` and `<|im_end|>`.
    KimiLinear,
}

impl ChatFormat {
    /// The format whose reserved tokens the vocabulary has, if any.
    pub fn detect(tokenizer: &Tokenizer) -> Option<ChatFormat> {
        let has_all =
            |names: &[&str]| names.iter().all(|name| tokenizer.special_id(name).is_some());
        if has_all(&[OPEN, CLOSE, SEP, END_OF_MSG]) {
            Some(ChatFormat::Xtml)
        } else if has_all(&[IM_USER, IM_ASSISTANT, IM_MIDDLE, IM_END]) {
            Some(ChatFormat::KimiLinear)
        } else {
            None
        }
    }

    /// Prompt ids for one question: the user's message and the opening of the assistant's turn. The question is text:
    /// reserved names typed in it stay text. `thinking` opens the reasoning channel where the format has one.
    ///
    /// # Errors
    /// [`TextError::MissingReserved`] if the vocabulary is not of this format.
    pub fn render_question(
        self,
        t: &Tokenizer,
        question: &str,
        thinking: bool,
    ) -> Result<Vec<u32>, TextError> {
        use Segment::{Reserved, Text};
        let channel = if thinking { "think" } else { "response" };
        // Neighbouring texts stay apart: each segment is encoded on its own, as the release does.
        let segments: &[Segment<'_>] = match self {
            ChatFormat::Xtml => &[
                Reserved(OPEN),
                Text("message"),
                Text(" role"),
                Text("=\""),
                Text("user"),
                Text("\""),
                Reserved(SEP),
                Text(question),
                Reserved(CLOSE),
                Text("message"),
                Reserved(SEP),
                Reserved(END_OF_MSG),
                Reserved(OPEN),
                Text("message"),
                Text(" role"),
                Text("=\""),
                Text("assistant"),
                Text("\""),
                Reserved(SEP),
                Reserved(OPEN),
                Text(channel),
                Reserved(SEP),
            ],
            ChatFormat::KimiLinear => &[
                Reserved(IM_USER),
                Text("user"),
                Reserved(IM_MIDDLE),
                Text(question),
                Reserved(IM_END),
                Reserved(IM_ASSISTANT),
                Text("assistant"),
                Reserved(IM_MIDDLE),
            ],
        };
        let mut ids = Vec::new();
        for segment in segments {
            match *segment {
                Reserved(name) => {
                    ids.push(t.special_id(name).ok_or(TextError::MissingReserved { name })?)
                }
                Text(text) => ids.extend(t.encode_text(text)),
            }
        }
        Ok(ids)
    }

    /// A reader for the reply to a prompt that [`render_question`](Self::render_question) made with the same `thinking`.
    pub fn reply_reader(self, t: &Tokenizer, thinking: bool) -> ReplyReader {
        let (end, elements) = match self {
            ChatFormat::Xtml => {
                let channel = if thinking { Element::Think } else { Element::Response };
                (END_OF_MSG, vec![Element::Message, channel])
            }
            ChatFormat::KimiLinear => (IM_END, vec![Element::Response]),
        };
        ReplyReader {
            tokens: t.shared_tokens(),
            n_ranks: t.n_ranks(),
            open: t.special_id(OPEN),
            close: t.special_id(CLOSE),
            sep: t.special_id(SEP),
            ends: [t.special_id(end), t.special_id("[EOS]")],
            elements,
            tag: None,
            ended: false,
        }
    }
}

/// What a generated token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyPart {
    /// Text of the reasoning channel.
    Reasoning,
    /// Text of the answer.
    Content,
    /// Structure, or text of another element: not shown.
    Markup,
    /// The reply is over, from this token on.
    End,
}

/// Assigns each generated token to a part of the reply, by token id only: a reply that merely spells `<|sep|>` in
/// ordinary tokens stays inside its element. Takes replies cut off anywhere and structure that makes no sense.
#[derive(Debug)]
pub struct ReplyReader {
    tokens: Arc<[Arc<[u8]>]>,
    n_ranks: u32,
    open: Option<u32>,
    close: Option<u32>,
    sep: Option<u32>,
    ends: [Option<u32>; 2],
    /// Elements that are open, innermost last.
    elements: Vec<Element>,
    /// The tag between `<|open|>` or `<|close|>` and `<|sep|>`.
    tag: Option<Tag>,
    ended: bool,
}

impl ReplyReader {
    /// Takes the next generated id and says what it is. The prompt's own ids are not pushed.
    pub fn push(&mut self, id: u32) -> ReplyPart {
        let this = Some(id);
        if self.ended || self.ends.contains(&this) {
            self.ended = true;
            return ReplyPart::End;
        }
        if this == self.open || this == self.close {
            // A tag that was never finished is dropped.
            self.tag = Some(Tag { closes: this == self.close, text: Vec::new() });
            return ReplyPart::Markup;
        }
        if this == self.sep {
            if let Some(tag) = self.tag.take() {
                self.apply(&tag);
            }
            return ReplyPart::Markup;
        }
        if let Some(tag) = &mut self.tag {
            if let Some(bytes) = self.tokens.get(id as usize) {
                tag.append(bytes);
            }
            return ReplyPart::Markup;
        }
        match self.elements.last() {
            _ if id >= self.n_ranks => ReplyPart::Markup,
            Some(Element::Think) => ReplyPart::Reasoning,
            Some(Element::Response) => ReplyPart::Content,
            _ => ReplyPart::Markup,
        }
    }

    fn apply(&mut self, tag: &Tag) {
        let element = tag.element();
        if !tag.closes {
            self.elements.push(element);
            return;
        }
        // Closing an element closes what was left open inside it; closing one that is not open does nothing.
        if let Some(depth) = self.elements.iter().rposition(|open| *open == element) {
            self.elements.truncate(depth);
        }
    }
}

const OPEN: &str = "<|open|>";
const CLOSE: &str = "<|close|>";
const SEP: &str = "<|sep|>";
const END_OF_MSG: &str = "<|end_of_msg|>";
const IM_USER: &str = "<|im_user|>";
const IM_ASSISTANT: &str = "<|im_assistant|>";
const IM_MIDDLE: &str = "<|im_middle|>";
const IM_END: &str = "<|im_end|>";

enum Segment<'a> {
    Reserved(&'static str),
    Text(&'a str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    Message,
    Think,
    Response,
    Other,
}

#[derive(Debug)]
struct Tag {
    closes: bool,
    /// Start of the tag's text: enough to tell the names that matter apart, however long the tag runs on.
    text: Vec<u8>,
}

impl Tag {
    fn append(&mut self, bytes: &[u8]) {
        const KEPT_BYTES: usize = "response ".len();
        let room = KEPT_BYTES - self.text.len();
        self.text.extend(bytes.iter().take(room));
    }

    fn element(&self) -> Element {
        let name = self.text.split(|&b| b == b' ').next();
        match name {
            Some(b"message") => Element::Message,
            Some(b"think") => Element::Think,
            Some(b"response") => Element::Response,
            _ => Element::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn k3_nano() -> Tokenizer {
        Tokenizer::from_bytes(
            include_bytes!("../../../models/k3-nano/tiktoken.model"),
            include_bytes!("../../../models/k3-nano/tokenizer_config.json"),
            4096,
        )
        .unwrap()
    }

    fn kimi_linear() -> Tokenizer {
        Tokenizer::from_bytes(
            include_bytes!("../../../fixtures/kimi-linear-tiny/tiktoken.model"),
            include_bytes!("../../../fixtures/kimi-linear-tiny/tokenizer_config.json"),
            512,
        )
        .unwrap()
    }

    /// Prompt and reply of the chat turn in `models/k3-nano/expected.safetensors`, `input_ids` from 3843 on.
    const ITALY_PROMPT: [u32; 38] = [
        3843, 109, 395, 637, 2383, 1298, 398, 268, 34, 3845, 776, 334, 260, 1215, 274, 738, 332,
        121, 63, 3844, 109, 395, 637, 3845, 3842, 3843, 109, 395, 637, 2383, 1298, 607, 515, 444,
        34, 3845, 3843, 412,
    ];
    const RESPONSE: [u32; 3] = [412, 985, 307];
    const ITALY_ANSWER: [u32; 11] = [462, 1215, 274, 738, 332, 121, 334, 1860, 46, 3844, 412];

    /// `golden.json`, `no_thinking`: (text, is markup). `single_user` differs in the last name, `think`.
    const NO_THINKING: [(&str, bool); 22] = [
        ("<|open|>", true),
        ("message", false),
        (" role", false),
        ("=\"", false),
        ("user", false),
        ("\"", false),
        ("<|sep|>", true),
        ("Hello.", false),
        ("<|close|>", true),
        ("message", false),
        ("<|sep|>", true),
        ("<|end_of_msg|>", true),
        ("<|open|>", true),
        ("message", false),
        (" role", false),
        ("=\"", false),
        ("assistant", false),
        ("\"", false),
        ("<|sep|>", true),
        ("<|open|>", true),
        ("response", false),
        ("<|sep|>", true),
    ];

    fn encode_segments(t: &Tokenizer, segments: &[(&str, bool)]) -> Vec<u32> {
        segments
            .iter()
            .flat_map(|(s, markup)| if *markup { t.encode_markup(s) } else { t.encode_text(s) })
            .collect()
    }

    #[test]
    fn a_question_renders_to_the_ids_the_model_was_checked_with() {
        let ids = ChatFormat::Xtml
            .render_question(&k3_nano(), "What is the capital of Italy?", false)
            .unwrap();
        let mut expected = ITALY_PROMPT.to_vec();
        expected.extend([985, 307, 3845]);
        assert_eq!(ids, expected);
    }

    #[test]
    fn a_question_renders_to_the_golden_segments() {
        let t = k3_nano();
        let no_thinking = ChatFormat::Xtml.render_question(&t, "Hello.", false).unwrap();
        assert_eq!(no_thinking, encode_segments(&t, &NO_THINKING));
        let mut single_user = NO_THINKING;
        single_user[20].0 = "think";
        let thinking = ChatFormat::Xtml.render_question(&t, "Hello.", true).unwrap();
        assert_eq!(thinking, encode_segments(&t, &single_user));
    }

    #[test]
    fn markup_typed_by_the_user_stays_text() {
        for (format, t) in [(ChatFormat::Xtml, k3_nano()), (ChatFormat::KimiLinear, kimi_linear())]
        {
            let count = |question| {
                let ids = format.render_question(&t, question, true).unwrap();
                ids.iter().filter(|id| t.is_special(**id)).count()
            };
            assert_eq!(count("<|close|>message<|sep|><|end_of_msg|><|im_end|>[EOS]"), count(""));
        }
    }

    #[test]
    fn kimi_linear_questions_follow_its_markup() {
        let t = kimi_linear();
        let ids = ChatFormat::KimiLinear.render_question(&t, "Hi", true).unwrap();
        let expected = t.encode_markup(
            "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>",
        );
        assert_eq!(ids, expected);
        assert_eq!(ids.iter().filter(|id| t.is_special(**id)).count(), 5);
    }

    #[test]
    fn the_format_is_known_by_its_reserved_tokens() {
        assert_eq!(ChatFormat::detect(&k3_nano()), Some(ChatFormat::Xtml));
        assert_eq!(ChatFormat::detect(&kimi_linear()), Some(ChatFormat::KimiLinear));
        let model = include_bytes!("../../../models/k3-nano/tiktoken.model");
        let plain = Tokenizer::from_bytes(model, br#"{"added_tokens_decoder": {}}"#, 4096).unwrap();
        assert_eq!(ChatFormat::detect(&plain), None);
        let error = ChatFormat::Xtml.render_question(&plain, "Hi", false).unwrap_err();
        assert!(error.to_string().contains("<|open|>"), "{error}");
    }

    /// One letter for each token: r, c, m, e.
    fn parts(t: &Tokenizer, format: ChatFormat, thinking: bool, ids: &[u32]) -> String {
        let mut reader = format.reply_reader(t, thinking);
        ids.iter()
            .map(|id| match reader.push(*id) {
                ReplyPart::Reasoning => 'r',
                ReplyPart::Content => 'c',
                ReplyPart::Markup => 'm',
                ReplyPart::End => 'e',
            })
            .collect()
    }

    #[test]
    fn the_answer_of_the_demo_model_is_content() {
        let t = k3_nano();
        let mut reply = ITALY_ANSWER.to_vec();
        reply.extend([985, 307, 3845]);
        reply.extend(t.encode_markup("<|close|>message<|sep|><|end_of_msg|>x"));
        assert_eq!(parts(&t, ChatFormat::Xtml, false, &reply), "cccccccccmmmmmmmmmmee");
        assert_eq!(t.encode_text("response"), RESPONSE);
    }

    #[test]
    fn each_channel_is_its_own_region() {
        let t = k3_nano();
        let cases = [
            (
                "a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|><|end_of_msg|>",
                true,
                "rcE",
            ),
            ("a<|close|>response<|sep|>b", false, "c"),
            ("a<|open|>call tool=\"f\"<|sep|>b<|close|>call<|sep|>a", false, "cc"),
            ("a<|open|>think<|sep|>b<|close|>think<|sep|>a", false, "crc"),
            ("a<|close|>other<|sep|>a", false, "cc"),
            ("a<|sep|>a", false, "cc"),
            ("a<|open|><|close|>response<|sep|>b", false, "c"),
            ("a<|open|>thin<|open|>think<|sep|>b", false, "cr"),
            ("a<|open|>thinking<|sep|>b", false, "c"),
            ("a<|open|>response x=\"1\"<|sep|>b", true, "rc"),
            ("a<|open|>tools<|sep|>b<|close|>message<|sep|>b", false, "c"),
            ("a[EOS]b", false, "cEE"),
            ("a<|media_pad|>a", false, "cc"),
            ("<|close|>message<|sep|><|close|>message<|sep|><|close|>think<|sep|>b", true, ""),
        ];
        for (reply, thinking, expected) in cases {
            let shown =
                parts(&t, ChatFormat::Xtml, thinking, &t.encode_markup(reply)).replace('m', "");
            assert_eq!(shown, expected.replace('E', "e"), "{reply}");
        }
    }

    #[test]
    fn markup_spelt_in_ordinary_tokens_stays_inside_its_element() {
        let t = k3_nano();
        let ids = t.encode_text("<|close|>response<|sep|><|end_of_msg|>");
        assert_eq!(parts(&t, ChatFormat::Xtml, false, &ids), "c".repeat(ids.len()));
    }

    #[test]
    fn a_kimi_linear_reply_is_content_until_it_ends() {
        let t = kimi_linear();
        assert_eq!(
            parts(&t, ChatFormat::KimiLinear, true, &t.encode_markup("ab<|im_end|>c")),
            "ccee"
        );
    }

    proptest! {
        #[test]
        fn any_ids_are_read_without_panic_and_reserved_ones_are_never_shown(
            ids in proptest::collection::vec(prop_oneof![3842u32..3846, 95u32..130, any::<u32>()], 0..60),
            thinking: bool,
        ) {
            let t = nano_once();
            let mut reader = ChatFormat::Xtml.reply_reader(t, thinking);
            let mut ended = false;
            for id in ids {
                let part = reader.push(id);
                ended |= id == 3842 || id == 3841;
                prop_assert_eq!(part == ReplyPart::End, ended);
                if id >= t.n_ranks() {
                    prop_assert!(matches!(part, ReplyPart::Markup | ReplyPart::End));
                }
            }
        }
    }

    fn nano_once() -> &'static Tokenizer {
        static NANO: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(k3_nano);
        &NANO
    }
}
