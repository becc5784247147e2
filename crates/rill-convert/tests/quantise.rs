//! q8 and q4 against `tools/quantise_reference.py`: containers of the demo model against what it
//! printed, and fresh random rows against the script itself. Where `python3 -c "import numpy"` does
//! not work the latter report as ignored, by name; they never pass unrun.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use libtest_mimic::{Arguments, Failed, Trial};
use rill_convert::{Control, ExpertCodec, Plan, Progress, TrunkCodec, convert};
use rill_format::container::Container;
use rill_format::{Checkpoint, Folder};
use rill_kernels::{Codec, Matrix};
use serde::Deserialize;

const EXPECTED: &[u8] = include_bytes!("data/quantise.json");

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let missing = !args.list && !has_numpy();
    if missing {
        eprintln!("SKIP: `python3 -c \"import numpy\"` fails here, so nothing is compared with it");
    }
    let live = |name: &str, run: fn() -> Result<(), Failed>| {
        Trial::test(name, run).with_ignored_flag(missing)
    };
    let trials = vec![
        Trial::test("containers_hold_the_references_codes", containers_hold_the_references_codes),
        live("expected_values_are_what_the_script_prints", expected_values_are_current),
        live("random_rows_are_packed_as_in_the_script", random_rows_are_packed_as_in_the_script),
    ];
    libtest_mimic::run(&args, trials).exit_code()
}

/// One line of the expected values.
#[derive(Deserialize)]
struct Expected {
    tensor: String,
    format: String,
    shape: [usize; 2],
    codes_crc32: String,
    scales_crc32: String,
    /// Six digits.
    relative_error: f64,
}

fn containers_hold_the_references_codes() -> Result<(), Failed> {
    let expected: Vec<Expected> = serde_json::from_slice(EXPECTED)?;
    let checkpoint = Checkpoint::open(Folder::Disk(repository("models/k3-nano")))?;
    let mut compared = 0;
    for (format, experts, trunk) in
        [("q8", ExpertCodec::Q8, TrunkCodec::Q8), ("q4", ExpertCodec::Q4, TrunkCodec::Q4)]
    {
        let dir = tempfile::tempdir()?;
        let plan = Plan::new(&checkpoint, experts, trunk)?;
        let progress = |_: Progress| ControlFlow::Continue(());
        convert(&checkpoint, &plan, dir.path(), &Control { jobs: 2, progress: &progress })?;
        let container = Container::open(dir.path().to_owned())?;
        for e in expected.iter().filter(|e| e.format == format) {
            let (codes, scales) = stored(&container, &e.tensor)?;
            let crc32 = |bytes: &[u8]| format!("{:08x}", crc32fast::hash(bytes));
            let error = relative_error(&published(&checkpoint, e)?, e, &codes, &scales)?;
            let found = (crc32(&codes), crc32(&scales), error);
            let wanted = (e.codes_crc32.clone(), e.scales_crc32.clone(), e.relative_error);
            if found != wanted {
                return Err(format!("{} as {format}: {found:?}, not {wanted:?}", e.tensor).into());
            }
            compared += 1;
        }
    }
    if compared != expected.len() || compared < 15 {
        return Err(format!("{compared} of {} were compared", expected.len()).into());
    }
    Ok(())
}

/// Codes and scales of a tensor of the trunk or of an expert.
fn stored(container: &Container, tensor: &str) -> Result<(Vec<u8>, Vec<u8>), Failed> {
    let Some((before, rest)) = tensor.split_once(".block_sparse_moe.experts.") else {
        return Ok(container.read_tensor(tensor)?);
    };
    let layer = before.rsplit('.').next().unwrap().parse()?;
    let (expert, matrix) = rest.split_once('.').unwrap();
    let matrix = ["w1.weight", "w3.weight", "w2.weight"].iter().position(|m| *m == matrix);
    let layout = container.layout().unwrap();
    let mut record = vec![0; layout.record_bytes];
    container.read_record(layer, expert.parse()?, true, &mut record)?;
    let (codes, scales) = layout.matrix(&record, matrix.unwrap());
    Ok((codes.to_vec(), scales.to_vec()))
}

/// Weights of the checkpoint.
fn published(checkpoint: &Checkpoint, e: &Expected) -> Result<Vec<f32>, Failed> {
    if let Some(info) = checkpoint.find(&e.tensor) {
        return Ok(info.dtype.decode(&checkpoint.read(info.id)?));
    }
    let read = |part: &str| -> Result<Vec<u8>, Failed> {
        let info = checkpoint.require(&format!("{}_{part}", e.tensor))?;
        Ok(checkpoint.read(info.id)?)
    };
    decode(Codec::Mxfp4, e.shape, &read("packed")?, &read("scale")?)
}

fn decode(codec: Codec, [rows, cols]: [usize; 2], a: &[u8], b: &[u8]) -> Result<Vec<f32>, Failed> {
    let matrix = Matrix::new(codec, rows, cols, a, b)?;
    let mut weights = vec![0.0; rows * cols];
    weights.chunks_exact_mut(cols).enumerate().for_each(|(r, row)| matrix.decode_row(r, row));
    Ok(weights)
}

/// ‖w − w′‖ / ‖w‖ to six digits.
fn relative_error(w: &[f32], e: &Expected, codes: &[u8], scales: &[u8]) -> Result<f64, Failed> {
    let packed = decode(codec(&e.format, 128), e.shape, codes, scales)?;
    let square = |x: f64| x * x;
    let distance: f64 =
        w.iter().zip(&packed).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let norm: f64 = w.iter().map(|&a| square(f64::from(a))).sum();
    Ok(format!("{:.5e}", (distance / norm).sqrt()).parse()?)
}

fn codec(format: &str, group: usize) -> Codec {
    if format == "q8" { Codec::Q8 { group } } else { Codec::Q4 { group } }
}

fn expected_values_are_current() -> Result<(), Failed> {
    if python(&[], &[])? != EXPECTED {
        return Err(
            "tests/data/quantise.json is out of date: run tools/quantise_reference.py".into()
        );
    }
    Ok(())
}

fn random_rows_are_packed_as_in_the_script() -> Result<(), Failed> {
    const ROWS: usize = 200;
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let mut random = Random(seed);
    for format in ["q8", "q4"] {
        for (group, cols) in
            [(16, 1), (16, 31), (16, 64), (32, 100), (128, 128), (128, 257), (1024, 1100)]
        {
            let weights: Vec<f32> = (0..ROWS).flat_map(|_| row(&mut random, cols)).collect();
            let codec = codec(format, group);
            let layout = codec.layout(ROWS, cols)?;
            let (mut codes, mut scales) = (vec![0; layout.codes], vec![0; layout.scales]);
            let rows = codes.chunks_mut(layout.codes / ROWS);
            let rows = rows.zip(scales.chunks_mut(layout.scales / ROWS));
            for ((codes, scales), weights) in rows.zip(weights.chunks(cols)) {
                codec.encode_row(weights, codes, scales)?;
            }
            let input: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
            let expected =
                python(&["--encode", format, &group.to_string(), &cols.to_string()], &input)?;
            let found = [codes, scales].concat();
            if found != expected {
                let at = found.iter().zip(&expected).position(|(a, b)| a != b);
                return Err(format!(
                    "seed {seed}: {format} in groups of {group}, {ROWS} rows of {cols}: byte {at:?} \
                     of {} and {}",
                    found.len(),
                    expected.len()
                )
                .into());
            }
        }
    }
    Ok(())
}

/// Weights of one of several kinds: like a model's, on the edge between two codes, tiny, huge,
/// mostly zero.
fn row(random: &mut Random, cols: usize) -> Vec<f32> {
    let kind = random.below(7);
    let size = [1.0, 1e-3, 0.25, 2e-7, 4e-5, 2.5e5, 1.0][kind];
    let weight = |random: &mut Random| {
        let unit = random.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0;
        match kind {
            // Halves and quarters: ties everywhere.
            2 => (random.below(65) as f32 - 32.0) * size,
            // Few distinct magnitudes: the largest is there more than once.
            4 => [-size, size, 0.5 * size, -0.0][random.below(4)],
            6 if random.below(8) > 0 => [0.0, -0.0][random.below(2)],
            // Like a model's: many small, few large.
            0 => unit * unit * unit,
            _ => unit * size,
        }
    };
    (0..cols).map(|_| weight(random)).collect()
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n as u64) as usize
    }
}

/// Runs the script and returns what it printed.
fn python(args: &[&str], input: &[u8]) -> Result<Vec<u8>, Failed> {
    let mut child = Command::new("python3")
        .arg(repository("tools/quantise_reference.py"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()?;
    // The script reads all its input before it prints, so writing first cannot block for ever.
    child.stdin.take().unwrap().write_all(input)?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(format!("tools/quantise_reference.py failed: {}", output.status).into());
    }
    Ok(output.stdout)
}

fn has_numpy() -> bool {
    let mut command = Command::new("python3");
    command.args(["-c", "import numpy"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}
