//! The manifest of a `.rill` container, less its last two lines: the checksum, which no fuzzer would
//! find, is added. Where the rest parses, the files that it names are made, of zeros and of the sizes
//! it says, so that what lies behind the opening is reached.
#![no_main]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use rill_format::container::{ALIGN, Container, MANIFEST, Manifest, checksum};

/// Bytes of all files of one input.
const MAX_BYTES: u64 = 1 << 20;

static FOLDER: LazyLock<PathBuf> =
    LazyLock::new(|| std::env::temp_dir().join(format!("rill-fuzz-{}", std::process::id())));

fuzz_target!(|data: &[u8]| {
    let folder = FOLDER.as_path();
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).expect("the temporary folder can be written");
    let bytes = with_checksum(data);
    fs::write(folder.join(MANIFEST), &bytes).expect("there is room");
    if let Ok(manifest) = serde_json::from_slice::<Manifest>(&bytes) {
        make_files(folder, &manifest);
    }
    match Container::open(folder.to_owned()) {
        Ok(container) => use_it(&container),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});

fn with_checksum(data: &[u8]) -> Vec<u8> {
    let end = |digits: &str| format!("\n  \"checksum\": \"{digits}\"\n}}\n");
    let blank = [data, end("0000000000000000").as_bytes()].concat();
    [data, end(&format!("{:016x}", checksum(&blank))).as_bytes()].concat()
}

fn make_files(folder: &Path, manifest: &Manifest) {
    let small = manifest.files.iter().map(|file| (&file.name, file.bytes));
    let trunk = [(&manifest.trunk.file, manifest.trunk.bytes)];
    let banks = manifest.experts.iter().flat_map(|experts| &experts.banks);
    let stripes = banks.flat_map(|bank| {
        bank.stripes.iter().map(|stripe| &stripe.file).zip(bank.file_bytes())
    });
    let mut left = MAX_BYTES;
    for (name, bytes) in small.chain(trunk).chain(stripes) {
        // Nothing outside the folder, and no name that a file system would not take.
        let plain = name.len() < 100
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b));
        if plain && name != MANIFEST && !name.starts_with('.') && bytes <= left {
            left -= bytes;
            if let Ok(file) = File::create(folder.join(name)) {
                let _ = file.set_len(bytes);
            }
        }
    }
}

/// What an open container promises: everything the manifest names can be asked for, and what comes
/// has the size it says.
fn use_it(container: &Container) {
    let manifest = container.manifest();
    for run in &manifest.trunk.runs {
        let _ = container.verify_run(run);
        for tensor in &run.tensors {
            let (codes, scales) = container.read_tensor(&tensor.name).expect("it lies in its file");
            assert_eq!(codes.len() as u64, tensor.code_bytes);
            assert_eq!(scales.len() as u64, tensor.scale_bytes);
            let part = container.read_part(&tensor.name, false, tensor.code_bytes, &mut [0]);
            assert!(part.is_err());
        }
    }
    assert!(container.read_tensor("no such tensor").is_err());
    let Some(layout) = container.layout() else {
        assert!(container.bank_list().is_empty());
        return;
    };
    assert!(layout.record_bytes.is_multiple_of(ALIGN));
    for bank in container.bank_list() {
        assert_eq!(container.experts(bank.layer), bank.experts);
        let mut record = vec![0; container.record_bytes(bank.layer, 0)];
        assert!(!record.is_empty() && record.len() <= layout.record_bytes);
        // Zeros are no record.
        assert!(container.read_record(bank.layer, 0, true, &mut record).is_err());
        assert!(container.read_record(bank.layer, bank.experts, true, &mut record).is_err());
        if layout.varies() {
            continue;
        }
        for (expert, matrix) in [(0, 0), (bank.experts - 1, 2)] {
            layout.matrix_mut(&mut record, matrix).0.fill(1);
            layout.seal(&mut record, bank.layer, expert);
            assert!(layout.check(&record, bank.layer, expert, true).is_ok());
            record.fill(0);
        }
    }
}
