//! The manifest of a `.waste` container. The first eight input bytes are the size of `trunk.bin`,
//! little-endian.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((trunk_bytes, json)) = data.split_first_chunk() else { return };
    let trunk_bytes = u64::from_le_bytes(*trunk_bytes);
    match rill_format::parse_waste_manifest("manifest", json, trunk_bytes) {
        Ok(manifest) => {
            // What the parser promises: file order, no overlap, nothing beyond the end.
            let mut end = 0;
            for tensor in &manifest.tensors {
                let place = tensor.place();
                assert!(end <= place.start && place.start < place.end);
                end = place.end;
            }
            assert!(end <= trunk_bytes);
            let n_codebooks = 3 * manifest.experts.stages;
            for layer in manifest.layers.values() {
                assert!(layer.record_bytes > 0 && layer.record_bytes.is_multiple_of(4096));
                assert!(usize::from(layer.codebook_base) + n_codebooks <= 65_536);
                assert!(!layer.file.contains(['/', '\\', ':']));
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
