//! A safetensors header. The first eight input bytes are the length of the payload, little-endian.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((payload_bytes, header)) = data.split_first_chunk() else { return };
    let payload_bytes = u64::from_le_bytes(*payload_bytes);
    match rill_format::parse_header("shard", header, payload_bytes) {
        Ok(entries) => {
            // What the parser promises: payload order, no gap, no overlap, all of it.
            let mut end = 0;
            for entry in &entries {
                assert_eq!(entry.begin, end);
                assert!(entry.end >= entry.begin);
                end = entry.end;
            }
            assert_eq!(end, payload_bytes);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
