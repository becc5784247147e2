//! Checking every byte of a container.

use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rill_format::container::{Container, checksum, fingerprint};

use crate::convert::{Control, Progress};
use crate::error::ConvertError;

/// Checks all runs, all records and the fingerprint of an open container; the manifest and the
/// small files were checked when it was opened.
///
/// # Errors
/// The first thing that is wrong, in the order of the work; [`ConvertError::Cancelled`] when the
/// progress callback breaks off.
pub fn verify(container: &Container, control: &Control<'_>) -> Result<(), ConvertError> {
    let manifest = container.manifest();
    let record_bytes = container.layout().map_or(0, |layout| layout.record_bytes);
    let banks = container.bank_list();
    let mut places: Vec<(Option<u32>, u32)> =
        (0..manifest.trunk.runs.len() as u32).map(|run| (None, run)).collect();
    for bank in banks {
        places.extend((0..bank.experts).map(|expert| (Some(bank.layer), expert)));
    }
    let n_runs = manifest.trunk.runs.len();
    let total_bytes = manifest.trunk.bytes + (places.len() - n_runs) as u64 * record_bytes as u64;
    let sums = Mutex::new((vec![0u64; places.len()], 0u64));
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || -> Result<(), ConvertError> {
        let mut record = vec![0; record_bytes];
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(layer, number)) = places.get(index) else { break };
            let (sum, bytes) = match layer {
                None => {
                    let run = &manifest.trunk.runs[number as usize];
                    container.verify_run(run)?;
                    let sum = u64::from_str_radix(&run.checksum, 16).unwrap_or_default();
                    (sum, run.bytes)
                }
                Some(layer) => {
                    let sum = container.read_record(layer, number, true, &mut record)?;
                    (sum, record_bytes as u64)
                }
            };
            let done_bytes = {
                let mut sums = sums.lock().expect("no worker panicked");
                sums.0[index] = sum;
                sums.1 += bytes;
                sums.1
            };
            let progress = Progress { done_bytes, resumed_bytes: 0, total_bytes };
            if let ControlFlow::Break(()) = (control.progress)(progress) {
                return Err(ConvertError::Cancelled);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..control.jobs.max(1))
            .map(|_| scope.spawn(|| work().inspect_err(|_| stop.store(true, Ordering::Relaxed))))
            .collect();
        let results = workers.into_iter().map(|w| w.join().expect("workers do not panic"));
        results.collect::<Result<Vec<()>, _>>()
    })?;
    let (sums, _) = sums.into_inner().expect("no worker panicked");
    let mut all = Vec::new();
    for file in &manifest.files {
        all.push(checksum(&container.folder().read(&file.name, file.bytes)?));
    }
    all.extend(sums);
    let found = fingerprint(all);
    if found != manifest.fingerprint {
        return Err(ConvertError::Source(rill_format::FormatError::Container {
            file: container.folder().describe("manifest.json"),
            what: "the fingerprint".to_owned(),
            expected: manifest.fingerprint.clone(),
            found,
        }));
    }
    Ok(())
}
