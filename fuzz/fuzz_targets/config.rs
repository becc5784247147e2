//! `config.json`: a configuration, or at least one problem that can be printed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rill::config::ModelConfig;

fuzz_target!(|data: &[u8]| {
    match ModelConfig::from_json(data) {
        Ok(config) => {
            assert!(!config.layers.is_empty());
            assert!(config.moe.top_k <= config.moe.n_experts);
        }
        Err(error) => {
            assert!(!error.problems().is_empty());
            assert!(!error.to_string().is_empty());
        }
    }
});
