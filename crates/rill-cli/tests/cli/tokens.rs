//! `rill tokenize` and `rill detokenize`.

use serde_json::{Value, json};

use crate::common::{args, file, repository, rill, rill_fed};

#[test]
fn any_text_survives_tokenizing_and_detokenizing() {
    let mut random = 1u64;
    let mut bytes = || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) as u8
    };
    let noise: Vec<u8> = (0..2000).map(|_| bytes()).collect();
    let all_ascii: Vec<u8> = (0..128).collect();
    for text in [
        "",
        "Hello, world!",
        "trailing newline stays\n",
        "\n\n\r\n \t ",
        "naïve Ærøskøbing 北京 😀👩‍👩‍👧‍👦🇮🇹 e\u{301}",
        "<|open|>message<|sep|> [BOS] is text",
        "\u{feff}\0\u{10ffff}",
        &"a".repeat(5000),
        std::str::from_utf8(&all_ascii).unwrap(),
        &String::from_utf8_lossy(&noise),
    ] {
        for model in [&[][..], &["-m".into(), repository("fixtures/k3-tiny").into_os_string()]] {
            let ids = rill_fed(args!["tokenize"].iter().chain(model), text).done();
            let back = rill_fed(args!["detokenize"].iter().chain(model), &ids);
            assert_eq!(back.done(), text);
        }
    }
}

#[test]
fn text_that_is_not_utf_8_gets_replacement_characters() {
    let ids = rill_fed(["tokenize"], b"a\xffb\xf0\x9f").done();
    assert_eq!(rill_fed(["detokenize"], ids).done(), "a\u{fffd}b\u{fffd}");
    // Half a character is what these ids stand for, and exactly that comes out.
    let halves = rill(["tokenize", "😀"]).done();
    let first = halves.trim().split(',').next().unwrap();
    assert_eq!(rill(["detokenize", first]).stdout, "😀".as_bytes()[..1]);
}

#[test]
fn text_comes_from_an_argument_a_file_a_dash_or_a_pipe() {
    let ids = rill(["tokenize", "The capital\n"]).done();
    let (_folder, path) = file("The capital\n");
    assert_eq!(rill(args!["tokenize", "--file", path]).done(), ids);
    assert_eq!(rill_fed(["tokenize", "-"], "The capital\n").done(), ids);
    assert_eq!(rill_fed(["tokenize"], "The capital\n").done(), ids);
}

#[test]
fn ids_are_read_with_commas_spaces_and_line_ends() {
    let text = rill(["detokenize", "462,1215,274"]).done();
    for args in [&["462", "1215", "274"][..], &["462, 1215, 274"], &["462,", "1215 274,"]] {
        assert_eq!(rill(["detokenize"].iter().chain(args)).done(), text, "{args:?}");
    }
    assert_eq!(rill_fed(["detokenize"], "462\n1215\r\n274,\n").done(), text);
    assert_eq!(rill_fed(["detokenize", "-"], "462\t1215 274").done(), text);
    assert_eq!(rill(["detokenize"]).done(), "");
}

#[test]
fn names_of_reserved_tokens_are_text_unless_markup_is_asked_for() {
    let text = "<|open|>message<|sep|>";
    let plain = rill(["tokenize", text]).done();
    let markup = rill(["tokenize", "--markup", text]).done();
    let numbers =
        |ids: &str| -> Vec<u32> { ids.trim().split(',').map(|id| id.parse().unwrap()).collect() };
    assert!(numbers(&plain).iter().all(|&id| id < 3840), "{plain}");
    let markup = numbers(&markup);
    assert_eq!((markup[0], markup[markup.len() - 1]), (3843, 3845));
    let ids: Vec<String> = markup.iter().map(u32::to_string).collect();
    assert_eq!(rill(["detokenize", &ids.join(",")]).done(), text);
}

#[test]
fn json_has_ids_and_pieces() {
    let result = rill(["tokenize", "--json", "Hello, world"]).done();
    let result: Value = serde_json::from_str(&result).unwrap();
    let ids = rill(["tokenize", "Hello, world"]).done();
    assert_eq!(json!({ "x": result["ids"] }).to_string(), format!("{{\"x\":[{}]}}", ids.trim()));
    let pieces = result["pieces"].as_array().unwrap();
    assert_eq!(pieces.len(), result["ids"].as_array().unwrap().len());
    let joined: String = pieces.iter().map(|piece| piece.as_str().unwrap()).collect();
    assert_eq!(joined, "Hello, world");
}

#[test]
fn an_id_outside_the_vocabulary_is_named() {
    let message = rill(["detokenize", "1,4096"]).failed();
    assert!(message.contains("4096 at position 1"), "{message}");
    let message = rill_fed(["detokenize"], "1 two 3").failed();
    assert!(message.contains("\"two\" is not a token id"), "{message}");
}
