//! Token identity with the committed corpus, and what must hold for any text.

mod common;

use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::k3_nano;
use proptest::prelude::*;
use rill_text::{TextError, Tokenizer};

static NANO: LazyLock<Tokenizer> = LazyLock::new(k3_nano);

#[test]
fn every_corpus_case_has_the_ids_of_tiktoken() {
    let corpus = include_str!("data/corpus.jsonl");
    let mut n_cases = 0;
    for (line, number) in corpus.lines().zip(1..) {
        let (text, ids): (String, Vec<u32>) = serde_json::from_str(line).unwrap();
        let bytes = STANDARD.decode(text).unwrap();
        assert_eq!(NANO.encode_text_bytes(&bytes), ids, "line {number}: {}", bytes.escape_ascii());
        n_cases += 1;
    }
    assert!(n_cases >= 2000, "{n_cases} cases");
}

#[test]
fn the_demo_vocabulary_has_its_reserved_tokens() {
    assert_eq!((NANO.n_ranks(), NANO.vocab_size()), (3840, 4096));
    assert_eq!(NANO.special_id("<|open|>"), Some(3843));
    assert_eq!(NANO.special_id("[PAD]"), Some(4095));
    assert_eq!(NANO.special_id("the"), None);
    assert_eq!(NANO.token_bytes(3843), Some(b"<|open|>".as_slice()));
    assert_eq!(NANO.token_bytes(4096), None);
    let special: Vec<bool> = [3839, 3840, 4095, 4096].map(|id| NANO.is_special(id)).into();
    assert_eq!(special, [false, true, true, false]);
}

#[test]
fn ids_without_a_name_get_one() {
    let model = common::model_file(&common::single_bytes());
    let t =
        Tokenizer::from_bytes(model.as_bytes(), br#"{"added_tokens_decoder": {}}"#, 258).unwrap();
    assert_eq!(t.special_id("<|reserved_token_257|>"), Some(257));
    assert_eq!(t.encode_markup("a<|reserved_token_256|>"), [97, 256]);
}

#[test]
fn markup_resolves_names_and_text_never_does() {
    let markup = "[BOS]a<|open|><|op<|sep|>b|>";
    let mut expected = vec![3840];
    expected.extend(NANO.encode_text("a"));
    expected.push(3843);
    expected.extend(NANO.encode_text("<|op"));
    expected.push(3845);
    expected.extend(NANO.encode_text("b|>"));
    assert_eq!(NANO.encode_markup(markup), expected);
    assert!(NANO.encode_text(markup).iter().all(|id| !NANO.is_special(*id)));
}

#[test]
fn the_longest_of_overlapping_names_is_taken() {
    let model = common::model_file(&common::single_bytes());
    let config =
        br#"{"added_tokens_decoder": {"256": {"content": "<a"}, "257": {"content": "<a>"}}}"#;
    let t = Tokenizer::from_bytes(model.as_bytes(), config, 258).unwrap();
    assert_eq!(t.encode_markup("<a><a"), [257, 256]);
}

#[test]
fn an_unknown_id_is_named_with_its_position() {
    let error = NANO.decode(&[72, 105, 4096]).unwrap_err();
    assert!(matches!(error, TextError::UnknownId { id: 4096, position: 2, vocab_size: 4096 }));
    assert!(error.to_string().starts_with("token id 4096 at position 2 "), "{error}");
}

#[test]
fn ranks_may_come_in_any_order_with_blank_lines_and_crlf() {
    let mut lines: Vec<String> =
        common::model_file(&common::single_bytes()).lines().map(str::to_string).collect();
    lines.reverse();
    let model = lines.join("\r\n\r\n");
    let t =
        Tokenizer::from_bytes(model.as_bytes(), br#"{"added_tokens_decoder": {}}"#, 256).unwrap();
    assert_eq!(t.encode_text("az"), [97, 122]);
}

#[test]
fn a_tokenizer_can_be_shared_between_threads() {
    fn shareable<T: Send + Sync>(_: &T) {}
    shareable(&*NANO);
}

/// Text that mixes any characters with the names of reserved tokens.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        any::<String>(),
        "[a-zA-Z0-9' \n\t.]{0,20}",
        "\\PC{0,8}",
        proptest::sample::select(vec![
            "<|open|>",
            "<|sep|>",
            "[BOS]",
            "<|reserved_token_3900|>",
            "<|",
            "  ",
            "中文",
            "\r\n"
        ])
        .prop_map(str::to_string),
    ];
    proptest::collection::vec(part, 0..6).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decoding_gives_back_any_text(text in text()) {
        prop_assert_eq!(NANO.decode(&NANO.encode_text(&text)).unwrap(), text.as_bytes());
        prop_assert_eq!(NANO.decode(&NANO.encode_markup(&text)).unwrap(), text.as_bytes());
    }

    #[test]
    fn text_never_becomes_a_reserved_token(text in text()) {
        prop_assert!(NANO.encode_text(&text).iter().all(|id| *id < NANO.n_ranks()));
    }

    #[test]
    fn a_streamed_decode_equals_the_whole(bytes: Vec<u8>, extra in text()) {
        let mut ids = NANO.encode_text(&extra);
        ids.extend(bytes.iter().map(|b| u32::from(*b)));
        let mut stream = NANO.decoder();
        let mut streamed: String = ids.iter().map(|id| stream.push(NANO.token_bytes(*id).unwrap())).collect();
        streamed.push_str(&stream.finish());
        let whole = NANO.decode(&ids).unwrap();
        prop_assert_eq!(streamed, String::from_utf8_lossy(&whole));
    }
}
