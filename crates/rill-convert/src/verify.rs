//! Checking every byte of a container, and measuring how far its weights are from the source's.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rill_format::container::{Container, checksum, fingerprint};

use crate::convert::{Control, Progress, rows_per_piece};
use crate::error::ConvertError;
use crate::plan::{MAX_SMALL_BYTES, SMALL_FILES};
use crate::source::{ConvertSource, Form, SourceExperts, SourceTensor, StoredBytes};

/// Checks all runs, all records and the fingerprint of an open container; the manifest and the
/// small files were checked when it was opened.
///
/// # Errors
/// The first thing that is wrong, in the order of the work; [`ConvertError::Cancelled`] when the
/// progress callback breaks off.
pub fn verify(container: &Container, control: &Control<'_>) -> Result<(), ConvertError> {
    let manifest = container.manifest();
    let n_runs = manifest.trunk.runs.len();
    let records = records(container);
    let expert_bytes: u64 =
        records.iter().map(|&(layer, expert)| container.record_bytes(layer, expert) as u64).sum();
    let total_bytes = manifest.trunk.bytes + expert_bytes;
    let sums = in_parallel(n_runs + records.len(), total_bytes, control, |index, record| {
        if let Some(run) = manifest.trunk.runs.get(index) {
            container.verify_run(run)?;
            let sum = u64::from_str_radix(&run.checksum, 16).unwrap_or_default();
            return Ok((sum, run.bytes));
        }
        let (layer, expert) = records[index - n_runs];
        record.resize(container.record_bytes(layer, expert), 0);
        let sum = container.read_record(layer, expert, true, record)?;
        Ok((sum, record.len() as u64))
    })?;
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

/// How far the weights of one class are from the source's. The error of a tensor is ‖w − w′‖ / ‖w‖:
/// 0 for equal weights, infinite where the source has nothing but zeros and the container has not.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightError {
    /// The tensors' name with `*` in place of its numbers; for experts, that of their layer.
    pub class: String,
    /// How the container stores them.
    pub format: String,
    /// Whether they are routed experts.
    pub experts: bool,
    /// Tensors in the class.
    pub tensors: u64,
    /// Weights in the class.
    pub weights: u64,
    /// Mean of the tensors' errors.
    pub mean: f64,
    /// Largest of the tensors' errors.
    pub worst: f64,
    /// The tensor that has it, the first of equals.
    pub worst_tensor: String,
}

/// Compares every weight of a container with those that it was made from. Trunk classes come first,
/// by name, then expert layers in order; the numbers do not depend on `control.jobs`.
///
/// Peak memory for each job is about two experts and 64 MB.
///
/// # Errors
/// When a tensor is missing on either side or has another shape there, cannot be read, or is not
/// what its format allows; [`ConvertError::Cancelled`] when the progress callback breaks off.
pub fn weight_errors(
    container: &Container,
    source: &dyn ConvertSource,
    control: &Control<'_>,
) -> Result<Vec<WeightError>, ConvertError> {
    source.check()?;
    let pairs = trunk_pairs(container, source)?;
    let experts = expert_pair(container, source)?;
    let records: Vec<(usize, u32)> = match &experts {
        None => Vec::new(),
        Some((ours, _)) => {
            let banks = ours.banks.iter().enumerate();
            banks.flat_map(|(bank, &(_, n))| (0..n).map(move |expert| (bank, expert))).collect()
        }
    };
    let record_bytes = container.layout().map_or(0, |layout| layout.record_bytes as u64);
    let total_bytes = container.manifest().trunk.bytes + records.len() as u64 * record_bytes;
    let measure = |index: usize, _: &mut Vec<u8>| {
        if let Some((ours, theirs)) = pairs.get(index) {
            let bytes = container.find(&ours.name).map_or(0, |t| t.code_bytes + t.scale_bytes);
            return Ok((vec![trunk_error(container, ours, source, theirs)?], bytes));
        }
        let (bank, expert) = records[index - pairs.len()];
        let (ours, theirs) = experts.as_ref().expect("records are of experts");
        let errors = expert_errors((container, ours), (source, theirs), bank, expert)?;
        Ok((errors, record_bytes))
    };
    let measured = in_parallel(pairs.len() + records.len(), total_bytes, control, measure)?;
    let mut classes: BTreeMap<(Option<u32>, String, String), WeightError> = BTreeMap::new();
    for tensor in measured.into_iter().flatten() {
        let key = (tensor.layer, tensor.class, tensor.format);
        let class = classes.entry(key.clone()).or_insert_with(|| WeightError {
            class: key.1,
            format: key.2,
            experts: key.0.is_some(),
            tensors: 0,
            weights: 0,
            mean: 0.0,
            worst: 0.0,
            worst_tensor: tensor.name.clone(),
        });
        class.tensors += 1;
        class.weights += tensor.weights;
        // The sum until all are in.
        class.mean += tensor.error;
        if tensor.error > class.worst {
            (class.worst, class.worst_tensor) = (tensor.error, tensor.name);
        }
    }
    let finish =
        |class: WeightError| WeightError { mean: class.mean / class.tensors as f64, ..class };
    Ok(classes.into_values().map(finish).collect())
}

/// Names of the small files that are not the source's: other bytes, or missing on one side.
///
/// # Errors
/// When one cannot be read.
pub fn differing_files(
    container: &Container,
    source: &dyn ConvertSource,
) -> Result<Vec<String>, ConvertError> {
    let mut differing = Vec::new();
    for name in SMALL_FILES {
        let ours = ConvertSource::small_file(container, name, MAX_SMALL_BYTES)?;
        if ours != source.small_file(name, MAX_SMALL_BYTES)? {
            differing.push(name.to_owned());
        }
    }
    Ok(differing)
}

/// One tensor's error and where it counts.
struct TensorError {
    /// Layer of an expert; `None` for the trunk, which sorts first.
    layer: Option<u32>,
    class: String,
    format: String,
    name: String,
    weights: u64,
    error: f64,
}

/// Layer and expert of every record, in the manifest's order.
fn records(container: &Container) -> Vec<(u32, u32)> {
    let banks = container.bank_list().iter();
    banks.flat_map(|bank| (0..bank.experts).map(|expert| (bank.layer, expert))).collect()
}

/// Does `n` pieces of work on some threads and returns what they gave, in order. `work` gets the
/// number of its piece and a buffer to use again, and also returns how many bytes it went through.
fn in_parallel<T: Send>(
    n: usize,
    total_bytes: u64,
    control: &Control<'_>,
    work: impl Fn(usize, &mut Vec<u8>) -> Result<(T, u64), ConvertError> + Sync,
) -> Result<Vec<T>, ConvertError> {
    let (next, stop, done) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(0));
    let worker = || -> Result<Vec<(usize, T)>, ConvertError> {
        let (mut buffer, mut results) = (Vec::new(), Vec::new());
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= n {
                break;
            }
            let (result, bytes) = work(index, &mut buffer)?;
            results.push((index, result));
            let done_bytes = {
                let mut done = done.lock().expect("no worker panicked");
                *done += bytes;
                *done
            };
            let progress = Progress { done_bytes, resumed_bytes: 0, total_bytes, layer: None };
            if let ControlFlow::Break(()) = (control.progress)(progress) {
                return Err(ConvertError::Cancelled);
            }
        }
        Ok(results)
    };
    let results = std::thread::scope(|scope| {
        let worker = || worker().inspect_err(|_| stop.store(true, Ordering::Relaxed));
        let workers: Vec<_> = (0..control.jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        // The first error in order of threads; all have stopped by then.
        let results = workers.into_iter().map(|w| w.join().expect("workers do not panic"));
        results.collect::<Result<Vec<_>, _>>()
    })?;
    let mut results: Vec<(usize, T)> = results.into_iter().flatten().collect();
    results.sort_by_key(|&(index, _)| index);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

/// Every tensor of the trunk as the container and as the source store it.
fn trunk_pairs(
    container: &Container,
    source: &dyn ConvertSource,
) -> Result<Vec<(SourceTensor, SourceTensor)>, ConvertError> {
    let theirs = source.trunk().into_iter().map(|tensor| (tensor.name.clone(), tensor));
    let mut theirs: BTreeMap<String, SourceTensor> = theirs.collect();
    let mut pairs = Vec::new();
    for ours in ConvertSource::trunk(container) {
        let Some(tensor) = theirs.remove(&ours.name) else {
            return Err(other_model(&ours.name, "is not in the source".to_owned()));
        };
        if ours.shape != tensor.shape {
            let (ours, theirs) = (&ours.shape, &tensor.shape);
            let reason = format!("has shape {ours:?}, and {theirs:?} in {}", tensor.file);
            return Err(other_model(&tensor.name, reason));
        }
        pairs.push((ours, tensor));
    }
    match theirs.first_key_value() {
        None => Ok(pairs),
        Some((name, tensor)) => {
            Err(other_model(name, format!("is in {}, and not in the container", tensor.file)))
        }
    }
}

/// The experts as the container and as the source store them; `None` where neither has any.
fn expert_pair(
    container: &Container,
    source: &dyn ConvertSource,
) -> Result<Option<(SourceExperts, SourceExperts)>, ConvertError> {
    let shape = |experts: &SourceExperts| {
        (experts.matrices.map(|m| (m.rows, m.cols)), experts.banks.clone())
    };
    match (ConvertSource::experts(container)?, source.experts()?) {
        (None, None) => Ok(None),
        (Some(ours), Some(theirs)) if shape(&ours) == shape(&theirs) => Ok(Some((ours, theirs))),
        _ => Err(other_model("the experts", "are not those of the source".to_owned())),
    }
}

/// Error of a tensor of the trunk, in pieces of whole rows.
fn trunk_error(
    container: &Container,
    ours: &SourceTensor,
    source: &dyn ConvertSource,
    theirs: &SourceTensor,
) -> Result<TensorError, ConvertError> {
    let (rows, cols) = ours.rows_and_cols();
    let rows_per_piece = rows_per_piece(cols);
    let mut sum = Distance::default();
    let mut first = 0;
    while first < rows {
        let n = rows_per_piece.min(rows - first);
        let stored = ConvertSource::read_rows(container, ours, first, n)?;
        let published = source.read_rows(theirs, first, n)?;
        let stored = decode(ours.form, (n, cols), &stored, &ours.name)?;
        sum.add(&decode(theirs.form, (n, cols), &published, &ours.name)?, &stored);
        first += n;
    }
    Ok(TensorError {
        layer: None,
        class: numbers_starred(&ours.name),
        format: ours.form.to_string(),
        name: ours.name.clone(),
        weights: rows * cols,
        error: sum.relative(),
    })
}

/// Errors of gate, up and down of an expert.
fn expert_errors(
    (container, ours): (&Container, &SourceExperts),
    (source, theirs): (&dyn ConvertSource, &SourceExperts),
    bank: usize,
    expert: u32,
) -> Result<Vec<TensorError>, ConvertError> {
    let stored = ConvertSource::read_expert(container, ours, bank, expert)?;
    let published = source.read_expert(theirs, bank, expert)?;
    let mut errors = Vec::new();
    for index in 0..3 {
        let (rows, cols) = (ours.matrices[index].rows, ours.matrices[index].cols);
        let name = ours.name(bank, expert, index);
        let form = ours.matrices[index].form;
        let stored = decode(form, (rows, cols), &stored[index], &name)?;
        let published =
            decode(theirs.matrices[index].form, (rows, cols), &published[index], &name)?;
        let mut sum = Distance::default();
        sum.add(&published, &stored);
        let (before, _) = name.split_once(".experts.").unwrap_or((&name, ""));
        errors.push(TensorError {
            layer: Some(ours.banks[bank].0),
            class: format!("{before}.experts.*"),
            format: form.to_string(),
            name: name.clone(),
            weights: rows * cols,
            error: sum.relative(),
        });
    }
    Ok(errors)
}

/// Plain numbers of some rows.
fn decode(
    form: Form,
    (rows, cols): (u64, u64),
    (codes, scales): &StoredBytes,
    name: &str,
) -> Result<Vec<f32>, ConvertError> {
    form.decode(rows as usize, cols as usize, codes, scales)
        .map_err(|source| ConvertError::Layout { tensor: name.to_owned(), source })
}

/// Sums of squares for ‖w − w′‖ and ‖w‖, in the order of the weights.
#[derive(Default)]
struct Distance {
    difference: f64,
    source: f64,
}

impl Distance {
    fn add(&mut self, source: &[f32], stored: &[f32]) {
        for (&w, &s) in source.iter().zip(stored) {
            self.source += f64::from(w).powi(2);
            // Equal bits are equal weights, be they not a number.
            if w.to_bits() != s.to_bits() {
                self.difference += (f64::from(w) - f64::from(s)).powi(2);
            }
        }
    }

    fn relative(&self) -> f64 {
        if self.difference == 0.0 {
            return 0.0;
        }
        let error = (self.difference / self.source).sqrt();
        if error.is_nan() { f64::INFINITY } else { error }
    }
}

/// A name with `*` for each part that is a number.
fn numbers_starred(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let parts: Vec<&str> =
        name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect();
    parts.join(".")
}

fn other_model(tensor: &str, found: String) -> ConvertError {
    ConvertError::Tensor {
        tensor: tensor.to_owned(),
        reason: format!("{found}; name the source that the container was made from"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_zeros_and_of_what_is_not_a_number_are_defined() {
        for (source, container, expected) in [
            ([3.0, 4.0], [3.0, 4.0], 0.0),
            ([3.0, 4.0], [3.0, 9.0], 1.0),
            ([0.0, 0.0], [0.0, 0.0], 0.0),
            ([0.0, 0.0], [0.0, 1.0], f64::INFINITY),
            ([f32::NAN, 1.0], [f32::NAN, 1.0], 0.0),
            ([f32::NAN, 1.0], [f32::NAN, 2.0], f64::INFINITY),
            ([f32::INFINITY, 1.0], [1.0, 1.0], f64::INFINITY),
        ] {
            let mut sum = Distance::default();
            sum.add(&source, &container);
            assert_eq!(sum.relative(), expected, "{source:?} {container:?}");
        }
    }

    #[test]
    fn numbers_in_names_become_stars() {
        for (name, class) in [
            ("model.layers.12.self_attn.q_proj.weight", "model.layers.*.self_attn.q_proj.weight"),
            ("vision_tower.blocks.0.norm0.weight", "vision_tower.blocks.*.norm0.weight"),
            ("lm_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(numbers_starred(name), class);
        }
    }
}
