//! How fast a drive delivers, and how it wants to be read: found by reading a little of it.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::buffer::AlignedBuf;
use crate::error::StreamError;
use crate::place::{Extent, Placement};
use crate::readers::{Priority, ReadOptions, Readers};
use crate::storage::{READ_ALIGN, Storage};

/// Bytes that one setting is tried with; two pieces for each thread where that is more.
const TRIAL_BYTES: usize = 32 << 20;
/// Memory that a trial takes: little enough for the smallest budget, of which nothing else has been
/// taken yet.
const MEMORY_BYTES: usize = 32 << 20;
/// After this no further setting is tried.
const PATIENCE: Duration = Duration::from_millis(300);
/// Files smaller than this in all are read so quickly that looking would take longer.
const WORTHWHILE_BYTES: u64 = 2 << 30;
const THREADS: [usize; 4] = [1, 2, 4, 8];
const PIECES: [usize; 3] = [1 << 20, 4 << 20, 16 << 20];
/// A setting with more threads, or another size, has to be this much faster.
const WORTHWHILE_GAIN: f64 = 1.05;

/// Most threads that a probe may choose.
pub const MAX_PROBED_READERS: usize = THREADS[THREADS.len() - 1];

/// What a probe found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveSpeed {
    /// The most it delivered.
    pub bytes_per_second: f64,
    /// With these settings.
    pub options: ReadOptions,
}

impl DriveSpeed {
    /// Whether the drive will hold up whatever the rest of the machine does: a USB drive, a disk that
    /// turns, a network.
    #[must_use]
    pub fn is_slow(&self) -> bool {
        self.bytes_per_second < 0.5e9
    }
}

/// Reads a little from files of these sizes, in several ways. `None` when there is too little to
/// read for that to be worth while, or it cannot be read; whoever needs the bytes will hear why.
///
/// # Errors
/// When reading threads cannot be started.
pub fn probe(
    storage: &Arc<dyn Storage>,
    file_bytes: &[u64],
) -> Result<Option<DriveSpeed>, StreamError> {
    if file_bytes.iter().sum::<u64>() < WORTHWHILE_BYTES {
        return Ok(None);
    }
    let start = Instant::now();
    let mut next = 0;
    let mut failed = None;
    let chosen = choose(|options| {
        if start.elapsed() > PATIENCE {
            return None;
        }
        match trial(storage, file_bytes, options, &mut next) {
            Ok(speed) => speed,
            Err(error) => {
                failed = Some(error);
                None
            }
        }
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(chosen),
    }
}

/// Tries settings until `measure`, which gives bytes per second, has had enough: first how many
/// threads, then pieces of which size. As few threads are chosen as deliver nearly the most; on a
/// machine so busy that not all could be tried, the usual settings are better than a guess.
fn choose(mut measure: impl FnMut(ReadOptions) -> Option<f64>) -> Option<DriveSpeed> {
    let usual = ReadOptions::default();
    let tried: Vec<(ReadOptions, f64)> = THREADS
        .iter()
        .map(|&threads| ReadOptions { threads, ..usual })
        .map_while(|options| Some((options, measure(options)?)))
        .collect();
    let most = tried.iter().map(|(_, speed)| *speed).fold(0.0, f64::max);
    if tried.len() < THREADS.len() {
        let found = DriveSpeed { bytes_per_second: most, options: usual };
        return (!tried.is_empty()).then_some(found);
    }
    let enough = tried.into_iter().find(|(_, speed)| *speed * WORTHWHILE_GAIN >= most);
    let (options, _) = enough.expect("the fastest is as fast as the fastest");
    let mut best = DriveSpeed { bytes_per_second: most, options };
    for piece_bytes in PIECES.into_iter().filter(|&bytes| bytes != usual.piece_bytes) {
        let options = ReadOptions { piece_bytes, ..options };
        // Larger pieces than there is memory for are passed over.
        let Some(speed) = measure(options) else { continue };
        if speed > best.bytes_per_second * WORTHWHILE_GAIN {
            best = DriveSpeed { bytes_per_second: speed, options };
        }
    }
    Some(best)
}

/// Bytes per second of some reads, none of which another trial has made before. `None` for settings
/// that would take too much memory, and when something does not come.
fn trial(
    storage: &Arc<dyn Storage>,
    file_bytes: &[u64],
    options: ReadOptions,
    next: &mut u64,
) -> Result<Option<f64>, StreamError> {
    let reads = (TRIAL_BYTES / options.piece_bytes).max(2 * options.threads);
    let at_once = MEMORY_BYTES / options.piece_bytes;
    if at_once < options.threads {
        return Ok(None);
    }
    let (file, size) = (0..).zip(file_bytes).max_by_key(|(_, size)| **size).unwrap_or((0, &0));
    let bytes = (options.piece_bytes as u64).min(*size);
    let places = (size / bytes.max(1)).max(1);
    let readers = Readers::new(storage.clone(), options)?;
    let (send, receive) = mpsc::channel();
    let mut submit = |buffer: AlignedBuf| {
        // Far apart, as experts are.
        let offset = *next % places * bytes;
        *next = next.wrapping_add(0x9E37_79B9);
        let placement = Placement::new(&[Extent { file, offset, bytes }]);
        let send = send.clone();
        let done = Box::new(move |buffer: AlignedBuf, result: Result<(), _>| {
            // Nobody listens any more after a failure.
            let _ = send.send(result.is_ok().then_some(buffer));
        });
        let _ticket = readers.submit(Priority::Now, buffer, &placement, done);
    };
    let mut buffers = Vec::new();
    for _ in 0..at_once.min(reads) {
        let Some(mut buffer) = AlignedBuf::new(options.piece_bytes + READ_ALIGN) else {
            return Ok(None);
        };
        // The system's handing out of pages is not the drive's time.
        buffer.as_mut_slice().fill(1);
        buffers.push(buffer);
    }
    let start = Instant::now();
    let mut submitted = buffers.len();
    buffers.into_iter().for_each(&mut submit);
    for _ in 0..reads {
        match receive.recv() {
            Ok(Some(buffer)) if submitted < reads => {
                submit(buffer);
                submitted += 1;
            }
            Ok(Some(_)) => {}
            _ => return Ok(None),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Some((reads as u64 * bytes) as f64 / seconds.max(1e-9)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A drive whose speed is a function of how it is read.
    fn chosen(speed: impl Fn(usize, usize) -> f64) -> DriveSpeed {
        choose(|o| Some(speed(o.threads, o.piece_bytes))).expect("everything was measured")
    }

    #[test]
    fn as_few_threads_as_saturate_the_drive_are_chosen() {
        let saturated_at = |n: usize| move |threads: usize, _| 1e9 * threads.min(n) as f64;
        for n in [1, 2, 4, 8] {
            let found = chosen(saturated_at(n));
            assert_eq!(found.options.threads, n);
            assert_eq!(found.bytes_per_second, 1e9 * n as f64);
        }
        // A little more is not worth more threads.
        assert_eq!(chosen(|threads, _| 1e9 + 1e6 * threads as f64).options.threads, 1);
    }

    #[test]
    fn pieces_of_another_size_are_chosen_where_they_are_faster() {
        let usual = ReadOptions::default().piece_bytes;
        assert_eq!(chosen(|_, _| 1e9).options.piece_bytes, usual);
        let found = chosen(|_, piece| if piece > usual { 2e9 } else { 1e9 });
        assert_eq!(found.options.piece_bytes, 16 << 20);
        let found = chosen(|_, piece| if piece < usual { 2e9 } else { 1e9 });
        assert_eq!(found.options.piece_bytes, 1 << 20);
    }

    #[test]
    fn a_probe_that_is_broken_off_keeps_what_it_knows() {
        let mut left = 2;
        let found = choose(|o| {
            left -= 1;
            (left >= 0).then_some(1e8 * o.threads as f64)
        });
        let found = found.expect("two were measured");
        assert_eq!((found.options, found.bytes_per_second), (ReadOptions::default(), 2e8));
        assert!(found.is_slow());
        assert_eq!(choose(|_| None), None);
    }

    struct Zeros(u64);

    impl Storage for Zeros {
        fn read_at(&self, _: u32, offset: u64, out: &mut [u8]) -> std::io::Result<usize> {
            assert!(offset.is_multiple_of(READ_ALIGN as u64));
            Ok(out.len().min((self.0 - offset) as usize))
        }

        fn name(&self, _: u32) -> String {
            "zeros".to_owned()
        }
    }

    #[test]
    fn small_models_are_not_probed_and_large_ones_are_read_within_their_files() {
        let small: Arc<dyn Storage> = Arc::new(Zeros(1 << 30));
        assert_eq!(probe(&small, &[1 << 30]).expect("threads start"), None);
        let large: Arc<dyn Storage> = Arc::new(Zeros(3 << 30));
        let found = probe(&large, &[100, 3 << 30]).expect("threads start").expect("it was read");
        assert!(found.bytes_per_second > 0.0 && found.options.threads <= MAX_PROBED_READERS);
    }

    #[test]
    fn a_drive_that_fails_is_left_to_those_who_need_it() {
        struct Broken;
        impl Storage for Broken {
            fn read_at(&self, _: u32, _: u64, _: &mut [u8]) -> std::io::Result<usize> {
                Err(std::io::Error::other("it gave up"))
            }
            fn name(&self, _: u32) -> String {
                "broken".to_owned()
            }
        }
        let broken: Arc<dyn Storage> = Arc::new(Broken);
        assert_eq!(probe(&broken, &[3 << 30]).expect("threads start"), None);
    }
}
