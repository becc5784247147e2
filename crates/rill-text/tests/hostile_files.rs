//! Broken tokenizer files end in an error that names the file and the line or id.

mod common;

use common::{model_file, single_bytes};
use proptest::prelude::*;
use rill_text::{TextError, Tokenizer};

const NO_NAMES: &str = r#"{"added_tokens_decoder": {}}"#;

fn load(model: &[u8], config: &str, vocab_size: u32) -> Result<Tokenizer, TextError> {
    Tokenizer::from_bytes(model, config.as_bytes(), vocab_size)
}

/// The 256 single bytes and `more` lines after them: the first of those is line 257.
fn bytes_and(more: &[u8]) -> Vec<u8> {
    [model_file(&single_bytes()).as_bytes(), more].concat()
}

/// Asserts that a model file is refused with the given error.
macro_rules! model_error {
    ($model:expr, $vocab_size:expr, $pattern:pat, $message:expr) => {
        let error = load(&$model[..], NO_NAMES, $vocab_size).err().expect("the file is broken");
        assert!(matches!(error, $pattern), "{error:?}");
        assert_message(&error, "tiktoken.model", $message);
    };
}

/// Asserts that a config beside 256 ranks and a vocabulary of 260 is refused with the given error.
macro_rules! config_error {
    ($config:expr, $pattern:pat, $message:expr) => {
        let error = load(&bytes_and(b""), $config, 260).err().expect("the file is broken");
        assert!(matches!(error, $pattern), "{error:?}");
        assert_message(&error, "tokenizer_config.json", $message);
    };
}

fn assert_message(error: &TextError, file: &str, part: &str) {
    let message = error.to_string();
    assert!(message.starts_with(file), "{message}");
    assert!(message.contains(part), "{message}");
    assert!(message.chars().count() < 300, "{message}");
}

#[test]
fn an_empty_model_file_is_refused() {
    model_error!(b"", 260, TextError::EmptyModel, "no tokens");
    model_error!(b"\n\r\n  \n", 260, TextError::EmptyModel, "no tokens");
}

#[test]
fn a_line_that_is_not_two_fields_is_named() {
    model_error!(
        bytes_and(b"YWI=\n"),
        260,
        TextError::MalformedLine { line: 257, .. },
        "line 257: "
    );
    model_error!(
        bytes_and(b"YWI= 256 7\n"),
        260,
        TextError::MalformedLine { line: 257, .. },
        "\"YWI= 256 7\""
    );
}

#[test]
fn a_line_that_is_not_base64_is_named() {
    model_error!(
        bytes_and(b"Y!I= 256\n"),
        260,
        TextError::BadBase64 { line: 257, .. },
        "line 257: expected base64"
    );
    model_error!(bytes_and(b"YWI 256\n"), 260, TextError::BadBase64 { line: 257, .. }, "\"YWI\"");
    model_error!(bytes_and(b"YWJ= 256\n"), 260, TextError::BadBase64 { line: 257, .. }, "\"YWJ=\"");
}

#[test]
fn a_line_that_is_not_utf8_is_named_and_printed_escaped() {
    model_error!(
        bytes_and(b"\xff\xfe 256\n"),
        260,
        TextError::BadBase64 { line: 257, .. },
        "\"\\xff\\xfe\""
    );
    model_error!(bytes_and(b"YWI= \xff\n"), 260, TextError::BadRank { line: 257, .. }, "\"\\xff\"");
}

#[test]
fn a_rank_that_is_not_a_number_is_named() {
    for rank in ["x", "-1", "+256", "0256", "1e3", "4294967296", "99999999999999999999"] {
        let line = format!("YWI= {rank}\n");
        model_error!(bytes_and(line.as_bytes()), 260, TextError::BadRank { line: 257, .. }, rank);
    }
}

#[test]
fn a_token_without_bytes_is_named() {
    // An empty first field cannot be written; padding alone is not base64.
    model_error!(bytes_and(b"= 256\n"), 260, TextError::BadBase64 { line: 257, .. }, "line 257");
    model_error!(bytes_and(b" 256\n"), 260, TextError::MalformedLine { line: 257, .. }, "line 257");
}

#[test]
fn a_duplicate_rank_names_both_lines() {
    let pattern = "line 257: rank 255 was already given on line 256";
    model_error!(
        bytes_and(b"YWI= 255\n"),
        260,
        TextError::DuplicateRank { line: 257, first_line: 256, rank: 255 },
        pattern
    );
}

#[test]
fn duplicate_bytes_name_both_lines() {
    let pattern = "line 257: the bytes of rank 256 were already given on line 98";
    model_error!(
        bytes_and(b"YQ== 256\n"),
        260,
        TextError::DuplicateToken { line: 257, first_line: 98, rank: 256 },
        pattern
    );
}

#[test]
fn a_gap_in_the_ranks_is_named() {
    let pattern = "line 257: rank 257, but with 257 tokens ranks must fill 0 to 256";
    model_error!(
        bytes_and(b"YWI= 257\n"),
        260,
        TextError::RankGap { line: 257, rank: 257, n_ranks: 257 },
        pattern
    );
}

#[test]
fn a_missing_single_byte_is_named() {
    let mut tokens = single_bytes();
    tokens[0x7f] = b"ab".to_vec();
    model_error!(
        model_file(&tokens).as_bytes(),
        260,
        TextError::MissingByte { byte: 0x7f },
        "0x7f"
    );
}

#[test]
fn a_huge_line_is_refused_unread() {
    let line = [vec![b'A'; 1 << 20], b" 256\n".to_vec()].concat();
    model_error!(
        bytes_and(&line),
        260,
        TextError::LineTooLong { line: 257, bytes: 1_048_580, .. },
        "1048580 bytes"
    );
}

#[test]
fn a_rank_beyond_the_vocabulary_is_named() {
    let pattern = "line 256: rank 255, but config.json says vocab_size is 255";
    model_error!(
        bytes_and(b""),
        255,
        TextError::RankBeyondVocab { line: 256, rank: 255, vocab_size: 255 },
        pattern
    );
    model_error!(bytes_and(b""), 0, TextError::RankBeyondVocab { line: 1, .. }, "line 1");
}

#[test]
fn a_vocabulary_of_implausible_size_is_refused_without_allocating_it() {
    let error = load(&bytes_and(b""), NO_NAMES, u32::MAX).err().expect("the size is absurd");
    assert!(
        matches!(error, TextError::TooManyReserved { n_reserved: 4_294_967_039, .. }),
        "{error:?}"
    );
    assert_message(&error, "config.json", "vocab_size 4294967295");
}

#[test]
fn a_config_that_is_not_json_is_refused_with_its_line() {
    config_error!("", TextError::ConfigJson { .. }, "line 1 column 0");
    config_error!("{\n\"added_tokens_decoder\": {", TextError::ConfigJson { .. }, "line 2");
    config_error!(
        "{\"added_tokens_decoder\": {}} x",
        TextError::ConfigJson { .. },
        "trailing characters"
    );
    config_error!(&"[".repeat(100_000), TextError::ConfigJson { .. }, "line 1");
}

#[test]
fn a_config_of_the_wrong_types_is_refused() {
    config_error!("[]", TextError::ConfigJson { .. }, "added_tokens_decoder");
    config_error!("{}", TextError::ConfigJson { .. }, "missing field `added_tokens_decoder`");
    config_error!(
        r#"{"added_tokens_decoder": ["a"]}"#,
        TextError::ConfigJson { .. },
        "a map from ids"
    );
    config_error!(
        r#"{"added_tokens_decoder": {"256": "a"}}"#,
        TextError::ConfigJson { .. },
        "line 1"
    );
    config_error!(
        r#"{"added_tokens_decoder": {"256": {"content": 7}}}"#,
        TextError::ConfigJson { .. },
        "a string"
    );
    config_error!(
        r#"{"added_tokens_decoder": {"256": {}}}"#,
        TextError::ConfigJson { .. },
        "`content`"
    );
}

#[test]
fn a_config_key_that_is_not_an_id_is_named() {
    for key in ["x", "-1", "+256", "0256", "4294967296", ""] {
        let config = format!(r#"{{"added_tokens_decoder": {{"{key}": {{"content": "a"}}}}}}"#);
        config_error!(&config, TextError::BadReservedId { .. }, &format!("found \"{key}\""));
    }
}

#[test]
fn a_reserved_id_that_is_a_rank_is_named() {
    let config = r#"{"added_tokens_decoder": {"255": {"content": "<x>"}}}"#;
    config_error!(
        config,
        TextError::ReservedIdIsRank { id: 255, n_ranks: 256, .. },
        "id 255 (\"<x>\")"
    );
}

#[test]
fn a_reserved_id_beyond_the_vocabulary_is_named() {
    let config = r#"{"added_tokens_decoder": {"260": {"content": "<x>"}}}"#;
    config_error!(
        config,
        TextError::ReservedIdBeyondVocab { id: 260, vocab_size: 260, .. },
        "id 260 (\"<x>\")"
    );
}

#[test]
fn one_id_named_twice_is_refused() {
    let config = r#"{"added_tokens_decoder": {"256": {"content": "a"}, "256": {"content": "b"}}}"#;
    config_error!(config, TextError::DuplicateReservedId { id: 256 }, "id 256");
}

#[test]
fn one_name_for_two_ids_is_refused() {
    let config =
        r#"{"added_tokens_decoder": {"258": {"content": "<x>"}, "256": {"content": "<x>"}}}"#;
    config_error!(
        config,
        TextError::DuplicateReservedName { first_id: 256, id: 258, .. },
        "ids 256 and 258"
    );
    let config = r#"{"added_tokens_decoder": {"256": {"content": "<|reserved_token_257|>"}}}"#;
    config_error!(
        config,
        TextError::DuplicateReservedName { first_id: 256, id: 257, .. },
        "<|reserved_token_257|>"
    );
}

#[test]
fn a_reserved_name_of_no_or_too_many_bytes_is_refused() {
    let config = r#"{"added_tokens_decoder": {"256": {"content": ""}}}"#;
    config_error!(config, TextError::ReservedNameLength { id: 256, bytes: 0, .. }, "id 256");
    let config =
        format!(r#"{{"added_tokens_decoder": {{"256": {{"content": "{}"}}}}}}"#, "x".repeat(257));
    config_error!(&config, TextError::ReservedNameLength { id: 256, bytes: 257, .. }, "257 bytes");
}

/// A valid file with a few bytes overwritten, a part cut out and a part repeated.
fn damaged(file: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let edits = proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4);
    let few = || prop_oneof![Just(0usize), 1usize..12];
    (edits, any::<usize>(), few(), any::<usize>(), few()).prop_map(
        move |(edits, cut, n_cut, again, n_again)| {
            let mut file = file.clone();
            for (at, byte) in edits {
                let at = at % file.len();
                file[at] = byte;
            }
            let cut = cut % file.len();
            file.drain(cut..(cut + n_cut).min(file.len()));
            let again = again % file.len();
            let part = file[again..(again + n_again).min(file.len())].to_vec();
            file.splice(again..again, part);
            file
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_are_read_without_panic(model: Vec<u8>, config: Vec<u8>, vocab_size: u32) {
        prop_assert!(Tokenizer::from_bytes(&model, NO_NAMES.as_bytes(), vocab_size).is_err());
        prop_assert!(Tokenizer::from_bytes(&bytes_and(b""), &config, 260).is_err());
    }

    #[test]
    fn damaged_files_are_refused_or_work(
        model in damaged(bytes_and(b"YWI= 256\nYmM= 257\n")),
        config in damaged(br#"{"added_tokens_decoder": {"258": {"content": "<x>"}, "259": {"content": "y"}}}"#.to_vec()),
    ) {
        if let Ok(t) = Tokenizer::from_bytes(&model, &config, 262) {
            prop_assert_eq!(t.decode(&t.encode_markup("abc<x>y")).unwrap(), b"abc<x>y");
        }
    }
}
