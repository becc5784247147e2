//! A vocabulary: `tiktoken.model`, a zero byte, `tokenizer_config.json`. One that loads must give
//! back any text it encodes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rill_text::Tokenizer;

const VOCAB_SIZE: u32 = 4096;

fuzz_target!(|data: &[u8]| {
    let split = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (model, config) = data.split_at(split);
    let config = config.get(1..).unwrap_or_default();
    match Tokenizer::from_bytes(model, config, VOCAB_SIZE) {
        Ok(tokenizer) => {
            let text = String::from_utf8_lossy(config);
            let ids = tokenizer.encode_text(&text);
            assert!(ids.iter().all(|id| !tokenizer.is_special(*id)));
            for ids in [ids, tokenizer.encode_markup(&text)] {
                assert_eq!(tokenizer.decode(&ids).ok().as_deref(), Some(text.as_bytes()));
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
