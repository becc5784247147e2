//! Carrying a plan out.
//!
//! The destination first gets `convert.json` (`note.rs`), which names the plan and is locked while a
//! process is at work. Every run and every record is a task of its own that writes its own bytes, in
//! places that do not depend on the number of threads (`banks.rs` has those of records). Tasks go
//! through the source file by file. A record that is whole proves itself by its checksums; a finished
//! run is noted in `convert.log` with its checksum and is checked against it. What was made from a file
//! of the source that has changed since is made again. When all is done and synced, the manifest is
//! written, and the notes are removed.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rill_format::container::{
    self, Bank, Checksum, CodecName, MANIFEST, Run, Stripe, TrunkTensor, fingerprint, hex,
};
use rill_format::{Checkpoint, Folder};
use rill_kernels::{Codec, LayoutError, Matrix, Mxfp4zMatrix};

use crate::banks::{Banks, Whole, whole};
use crate::disk::{LineFile, OutFile, allocated_bytes, available_bytes, io_error, sync_folder};
use crate::error::ConvertError;
use crate::note::{NOTE, Note, SourceFile};
use crate::plan::{ExpertCodec, Plan};
use crate::reclaim::{self, Deletion, Ledger, Reclaim, Reclaimed};
use crate::sample::{Distance, LayerError, Sample};
use crate::source::{ConvertSource, Form, SourceTensor, StoredBytes, kernel_codec};
use crate::trellis;

const LOG: &str = "convert.log";
/// Source bytes that one task holds at a time while it works through a tensor of the trunk.
pub(crate) const PIECE_BYTES: u64 = 16 << 20;

/// How far a conversion has come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Bytes of the container that are written.
    pub done_bytes: u64,
    /// Of these, bytes that an earlier run had written.
    pub resumed_bytes: u64,
    /// Bytes of the container.
    pub total_bytes: u64,
    /// The layer whose experts have become complete just now, if anything of them was lost.
    pub layer: Option<LayerError>,
}

/// What the caller decides while a conversion runs.
pub struct Control<'a> {
    /// Threads that work, at least one.
    pub jobs: usize,
    /// Told after every task; may break off, which keeps what has been written.
    pub progress: &'a (dyn Fn(Progress) -> ControlFlow<()> + Sync),
}

/// Converts a checkpoint or a container into the folder `destination`.
///
/// Peak memory is [`Plan::job_bytes`] for each job.
///
/// # Errors
/// See [`ConvertError`]; after any of them the same call goes on where it stopped.
pub fn convert(
    source: &dyn ConvertSource,
    plan: &Plan,
    destination: &Path,
    control: &Control<'_>,
) -> Result<(), ConvertError> {
    carry_out(source, plan, destination, control, None)
}

/// [`convert`], and deletes each shard of the checkpoint once nothing more is to be read from it.
///
/// Before a shard is deleted, everything made from it has been synced and read back and has the
/// checksums it was made with, and a line of `reclaim.log` says so. When a task fails, the shards it
/// reads stay. A resumed conversion must open its source with
/// [`open_checkpoint`](crate::open_checkpoint), because shards are missing by then.
///
/// # Errors
/// See [`ConvertError`]; after any of them the same call goes on where it stopped.
pub fn convert_and_reclaim(
    source: &Checkpoint,
    plan: &Plan,
    destination: &Path,
    control: &Control<'_>,
    reclaim: &Reclaim,
) -> Result<Reclaimed, ConvertError> {
    reclaim.check_plan(source, plan)?;
    let reclaimer = Reclaimer {
        source,
        reclaim,
        left: Mutex::default(),
        ledger: Mutex::new(None),
        reclaimed: Mutex::default(),
    };
    carry_out(source, plan, destination, control, Some(&reclaimer))?;
    Ok(reclaimer.reclaimed.into_inner().expect("no worker panicked"))
}

/// What [`convert_and_reclaim`] would delete, in order.
pub fn deletions(source: &Checkpoint, plan: &Plan, reclaim: &Reclaim) -> Vec<Deletion> {
    Work::new(source, plan, Some(reclaim)).deletions(plan, reclaim)
}

fn carry_out(
    source: &dyn ConvertSource,
    plan: &Plan,
    destination: &Path,
    control: &Control<'_>,
    reclaimer: Option<&Reclaimer<'_>>,
) -> Result<(), ConvertError> {
    check_apart(&source.folder(), destination, plan)?;
    source.check()?;
    let work = Work::new(source, plan, reclaimer.map(|r| r.reclaim));
    let saving = reclaimer.map_or(0, |r| {
        let deletions = work.deletions(plan, r.reclaim);
        reclaim::saving_bytes(source, destination, plan.container_bytes(), &deletions)
    });
    let Some(target) = Target::prepare(destination, plan, source, &work, saving)? else {
        return Ok(());
    };
    if let Some(reclaimer) = reclaimer {
        reclaimer.begin(destination, &work)?;
    }
    let job = Job {
        source,
        plan,
        target: &target,
        control,
        work: &work,
        reclaimer,
        state: Mutex::new(State {
            progress: Progress {
                done_bytes: 0,
                resumed_bytes: 0,
                total_bytes: plan.container_bytes(),
                layer: None,
            },
            lost: vec![Lost::default(); plan.banks().len()],
            run_checksums: vec![0; plan.manifest.trunk.runs.len()],
            records: plan
                .banks()
                .iter()
                .map(|b| vec![Whole::default(); b.experts as usize])
                .collect(),
        }),
        stop: AtomicBool::new(false),
    };
    let next = AtomicUsize::new(0);
    let worker = || -> Result<(), ConvertError> {
        let _guard = StopOnPanic(&job);
        while !job.stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= work.tasks.len() {
                break;
            }
            job.run(index).inspect_err(|_| job.end())?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..control.jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        // The first error in order of threads; all have stopped by then.
        workers
            .into_iter()
            .map(|w| w.join().expect("workers do not panic"))
            .collect::<Result<Vec<()>, _>>()
    })?;
    let state = job.state.into_inner().expect("no worker panicked");
    target.finish(plan, &state)
}

#[derive(Clone, Copy, Debug)]
enum Task {
    /// Compare a file of the source with its published checksum.
    Check(usize),
    Run(usize),
    Record {
        bank: usize,
        expert: u32,
    },
}

/// Everything there is to do.
struct Work {
    /// The source's files by number.
    files: Vec<String>,
    /// Tasks, and the numbers of the files they read, ascending. In order of the first of these, so
    /// that a file is done with when tasks that begin in the next one come up.
    tasks: Vec<(Task, Vec<usize>)>,
}

impl Work {
    fn new(source: &dyn ConvertSource, plan: &Plan, reclaim: Option<&Reclaim>) -> Self {
        let files = source.files();
        let numbers: HashMap<&str, usize> =
            files.iter().zip(0..).map(|(name, i)| (name.as_str(), i)).collect();
        let numbered = |names: &mut dyn Iterator<Item = &str>| {
            let mut found: Vec<usize> =
                names.filter_map(|name| numbers.get(name).copied()).collect();
            found.sort_unstable();
            found.dedup();
            found
        };
        let mut tasks = Vec::new();
        for (index, tensors) in plan.run_sources.iter().enumerate() {
            let read = numbered(&mut tensors.iter().map(|tensor| tensor.file.as_str()));
            tasks.push((Task::Run(index), read));
        }
        for (bank, of) in plan.banks().iter().enumerate() {
            let experts = plan.expert_sources.as_ref().expect("banks have sources");
            for expert in 0..of.experts {
                let read = numbered(&mut source.expert_files(experts, bank, expert).into_iter());
                tasks.push((Task::Record { bank, expert }, read));
            }
        }
        // A wrong shard must be found out before its neighbours go, which what it was made into
        // has to be made from again: comparing it counts as reading everything read with it.
        let is_checked = |name: &str| {
            let shard = reclaim.and_then(|reclaim| reclaim.find(name));
            shard.is_some_and(|shard| shard.expected.is_some())
        };
        let checks = (0..files.len()).filter(|&file| is_checked(&files[file])).map(|file| {
            let together = tasks.iter().filter(|(_, read)| read.contains(&file));
            let mut read: Vec<usize> = together.flat_map(|(_, read)| read.clone()).collect();
            read.push(file);
            read.sort_unstable();
            read.dedup();
            (Task::Check(file), read)
        });
        let mut tasks: Vec<_> = checks.collect::<Vec<_>>().into_iter().chain(tasks).collect();
        // Stable: equals stay in the order of the container.
        tasks.sort_by_key(|(_, read)| read.first().copied());
        Self { files, tasks }
    }

    /// How many tasks read each file.
    fn readers(&self) -> Vec<usize> {
        let mut readers = vec![0; self.files.len()];
        self.tasks.iter().flat_map(|(_, read)| read).for_each(|&file| readers[file] += 1);
        readers
    }

    /// The experts of every bank in the order of the work.
    fn orders(&self, plan: &Plan) -> Vec<Vec<u32>> {
        let mut orders = vec![Vec::new(); plan.banks().len()];
        for (task, _) in &self.tasks {
            if let Task::Record { bank, expert } = *task {
                orders[bank].push(expert);
            }
        }
        orders
    }

    fn deletions(&self, plan: &Plan, reclaim: &Reclaim) -> Vec<Deletion> {
        let mut left = self.readers();
        let mut written_bytes = 0;
        let mut deletions = Vec::new();
        for (task, read) in &self.tasks {
            written_bytes += match *task {
                Task::Check(_) => 0,
                Task::Run(index) => plan.manifest.trunk.runs[index].bytes,
                Task::Record { .. } => plan.record_bytes(),
            };
            for &file in read {
                left[file] -= 1;
                if let Some(shard) = reclaim.find(&self.files[file]).filter(|_| left[file] == 0) {
                    let (file, bytes) = (shard.name.clone(), shard.bytes);
                    deletions.push(Deletion { file, bytes, written_bytes });
                }
            }
        }
        deletions
    }
}

/// What the workers share.
struct Job<'a> {
    source: &'a dyn ConvertSource,
    plan: &'a Plan,
    target: &'a Target,
    control: &'a Control<'a>,
    work: &'a Work,
    reclaimer: Option<&'a Reclaimer<'a>>,
    state: Mutex<State>,
    stop: AtomicBool,
}

struct State {
    progress: Progress,
    run_checksums: Vec<u64>,
    /// Per bank and expert.
    records: Vec<Vec<Whole>>,
    /// Per bank.
    lost: Vec<Lost>,
}

/// What packing has lost of a bank's experts. Summed up in the order in which they are done, so that the
/// last digits may differ from run to run; they are for people.
#[derive(Clone, Copy, Default)]
struct Lost {
    /// Experts that are whole.
    done: u32,
    /// Of these, experts that were packed with loss by this process.
    packed: u32,
    distance: Distance,
}

/// A worker that panics must not leave others waiting for its record.
struct StopOnPanic<'a>(&'a Job<'a>);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end();
        }
    }
}

/// What deleting shards needs.
struct Reclaimer<'a> {
    source: &'a Checkpoint,
    reclaim: &'a Reclaim,
    /// By file: tasks that have not finished.
    left: Mutex<Vec<usize>>,
    /// Also lets one shard go at a time.
    ledger: Mutex<Option<Ledger>>,
    reclaimed: Mutex<Reclaimed>,
}

impl Reclaimer<'_> {
    fn begin(&self, destination: &Path, work: &Work) -> Result<(), ConvertError> {
        *self.left.lock().expect("no worker panicked") = work.readers();
        let ledger = Ledger::open(destination, self.source)?;
        *self.ledger.lock().expect("no worker panicked") = Some(ledger);
        Ok(())
    }
}

impl Job<'_> {
    /// No further tasks are begun, and nobody waits for another's.
    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.target.banks.stop();
    }

    fn run(&self, index: usize) -> Result<(), ConvertError> {
        let (task, read) = &self.work.tasks[index];
        match *task {
            Task::Check(file) => self.check_file(file)?,
            Task::Run(index) => {
                let run = &self.plan.manifest.trunk.runs[index];
                let finished = self.target.finished_run(index, run)?;
                let checksum = match finished {
                    Some(checksum) => checksum,
                    None => {
                        let checksum = self.write_run(index, run)?;
                        self.target.note_run(index, checksum)?;
                        checksum
                    }
                };
                self.done(run.bytes, run.bytes, finished.is_some(), |state| {
                    state.run_checksums[index] = checksum;
                    None
                })?;
            }
            Task::Record { bank, expert } => {
                let finished = self.target.banks.finished(bank, expert)?;
                let made = match finished {
                    Some(record) => Some(record),
                    None => self.write_record(bank, expert)?,
                };
                // Others have stopped; so does this one.
                let Some(record) = made else { return Ok(()) };
                let most_bytes = self.plan.record_bytes();
                self.done(record.bytes, most_bytes, finished.is_some(), |state| {
                    state.records[bank][expert as usize] = record;
                    let lost = &mut state.lost[bank];
                    lost.done += 1;
                    let Bank { layer, experts, .. } = self.plan.banks()[bank];
                    let error = lost.distance.relative();
                    let complete = lost.done == experts && lost.packed > 0;
                    complete.then_some(LayerError { layer, experts: lost.packed, error })
                })?;
            }
        }
        let Some(reclaimer) = self.reclaimer else { return Ok(()) };
        for &file in read {
            let left = {
                let mut left = reclaimer.left.lock().expect("no worker panicked");
                left[file] -= 1;
                left[file]
            };
            if left == 0 {
                self.give_back(reclaimer, file)?;
            }
        }
        Ok(())
    }

    /// Counts what was made of what was planned with `planned_bytes`.
    fn done(
        &self,
        bytes: u64,
        planned_bytes: u64,
        resumed: bool,
        record: impl FnOnce(&mut State) -> Option<LayerError>,
    ) -> Result<(), ConvertError> {
        let progress = {
            let mut state = self.state.lock().expect("no worker panicked");
            let layer = record(&mut state);
            state.progress.done_bytes += bytes;
            state.progress.total_bytes -= planned_bytes - bytes;
            if resumed {
                state.progress.resumed_bytes += bytes;
            }
            Progress { layer, ..state.progress }
        };
        self.tell(progress)
    }

    fn tell(&self, progress: Progress) -> Result<(), ConvertError> {
        match (self.control.progress)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ConvertError::Cancelled),
        }
    }

    /// Compares a shard with its published checksum, unless that was done before.
    fn check_file(&self, file: usize) -> Result<(), ConvertError> {
        let Some(reclaimer) = self.reclaimer else { return Ok(()) };
        let name = &self.work.files[file];
        let Some(shard) = reclaimer.reclaim.find(name) else { return Ok(()) };
        let line = format!("checked {file} {} {}", shard.bytes, shard.modified_ns);
        if self.target.checked.contains(&line) {
            return Ok(());
        }
        shard.check_bytes(&|| {
            let progress = self.state.lock().expect("no worker panicked").progress;
            self.tell(progress)
        })?;
        self.target.log.lock().expect("no worker panicked").append(&line)
    }

    /// Deletes a shard that all of its tasks are done with. Until the deletion itself any failure
    /// leaves it where it is.
    fn give_back(&self, reclaimer: &Reclaimer<'_>, file: usize) -> Result<(), ConvertError> {
        let name = &self.work.files[file];
        // Gone before, or not to be deleted.
        let Some(shard) = reclaimer.reclaim.find(name) else { return Ok(()) };
        let mut ledger = reclaimer.ledger.lock().expect("no worker panicked");
        let made = self.work.tasks.iter().filter(|(_, read)| read.contains(&file));
        let made: Vec<Task> = made.map(|(task, _)| *task).collect();
        self.target.sync(&made)?;
        // What was written is the only copy from now on, so it is read again, from the drive where
        // the system can be told to. A record that is not as it was written is then found here, with
        // the shard still there to make it again from.
        for task in &made {
            let (intact, what) = match *task {
                Task::Check(_) => continue,
                Task::Run(index) => {
                    let run = &self.plan.manifest.trunk.runs[index];
                    let expected =
                        self.state.lock().expect("no worker panicked").run_checksums[index];
                    (self.target.run_checksum(run)? == expected, format!("the run {:?}", run.name))
                }
                Task::Record { bank, expert } => {
                    let expected = self.state.lock().expect("no worker panicked").records[bank]
                        [expert as usize]
                        .checksum;
                    let found = self.target.banks.finished(bank, expert)?.map(|r| r.checksum);
                    let layer = self.plan.banks()[bank].layer;
                    (found == Some(expected), format!("expert {expert} of layer {layer}"))
                }
            };
            if !intact {
                let folder = self.target.folder.display().to_string();
                return Err(ConvertError::ReadBack { folder, what, shard: name.clone() });
            }
        }
        let covered_by = self.covering(&made);
        let ledger = ledger.as_mut().expect("opened before the workers started");
        ledger.delete(reclaimer.source, shard, covered_by)?;
        let mut reclaimed = reclaimer.reclaimed.lock().expect("no worker panicked");
        reclaimed.files += 1;
        reclaimed.bytes += shard.bytes;
        Ok(())
    }

    /// What was made by some tasks, for people.
    fn covering(&self, tasks: &[Task]) -> Vec<String> {
        let mut covering = Vec::new();
        let mut records = vec![0u32; self.plan.banks().len()];
        for task in tasks {
            match *task {
                Task::Check(_) => {}
                Task::Run(index) => {
                    covering.push(format!("run {}", self.plan.manifest.trunk.runs[index].name));
                }
                Task::Record { bank, .. } => records[bank] += 1,
            }
        }
        for (bank, n) in self.plan.banks().iter().zip(records).filter(|(_, n)| *n > 0) {
            covering.push(format!("{n} of {} experts of layer {}", bank.experts, bank.layer));
        }
        covering
    }

    /// Writes a run from start to end and returns its checksum.
    fn write_run(&self, index: usize, run: &Run) -> Result<u64, ConvertError> {
        let mut out =
            RunWriter { target: self.target, base: run.offset, at: 0, sum: Checksum::default() };
        for (tensor, source) in run.tensors.iter().zip(&self.plan.run_sources[index]) {
            out.pad_to(tensor.offset)?;
            let scales = self.write_codes(tensor, source, &mut out)?;
            if !scales.is_empty() {
                out.pad_to(tensor.scale_offset())?;
                out.write(&scales)?;
            }
        }
        out.pad_to(run.bytes)?;
        Ok(out.sum.finish())
    }

    /// Encodes a tensor of the trunk piece by piece; returns its scales, which come after.
    fn write_codes(
        &self,
        tensor: &TrunkTensor,
        source: &SourceTensor,
        out: &mut RunWriter<'_>,
    ) -> Result<Vec<u8>, ConvertError> {
        let (rows, cols) = source.rows_and_cols();
        let layout_error = |source| ConvertError::Layout { tensor: tensor.name.clone(), source };
        let target = kernel_codec(tensor.codec).map_err(layout_error)?;
        let encoder = match target {
            Codec::Trellis(trellis) if !source.form.is(tensor.codec) => {
                let rows = |row| self.source.read_rows(source, row, 1);
                Some(trellis::encoder(trellis, source, &rows)?)
            }
            _ => None,
        };
        let mut scales = Vec::new();
        let mut row = 0;
        while row < rows {
            let n = rows_per_piece(cols).min(rows - row);
            let stored = self.source.read_rows(source, row, n)?;
            let piece = match &encoder {
                Some(encoder) => {
                    let shape = (n as usize, cols as usize);
                    let piece = trellis::pack_rows(target, encoder, source.form, shape, stored);
                    piece.map_err(layout_error)?
                }
                None => transcode(source.form, tensor.codec, (n, cols), stored, &tensor.name, row)?,
            };
            out.write(&piece.0)?;
            // Each piece has the tables in front, which are those of all.
            let tables = if row > 0 { target.table_bytes() } else { 0 };
            scales.extend(&piece.1[tables..]);
            row += n;
        }
        Ok(scales)
    }

    /// Builds one record and writes it; `None` when the conversion has been stopped meanwhile.
    fn write_record(&self, bank: usize, expert: u32) -> Result<Option<Whole>, ConvertError> {
        let layout = self.plan.layout.as_ref().expect("banks have a layout");
        let sources = self.plan.expert_sources.as_ref().expect("banks have sources");
        let parts = self.source.read_expert(sources, bank, expert)?;
        let (mut packed, mut distance) = (Vec::new(), None);
        for (index, stored) in parts.into_iter().enumerate() {
            let matrix = &layout.matrices[index];
            let name = sources.name(bank, expert, index);
            let form = sources.matrices[index].form;
            let shape = (matrix.rows, matrix.cols);
            let (rows, cols) = (matrix.rows as usize, matrix.cols as usize);
            let layout_error = |source| ConvertError::Layout { tensor: name.clone(), source };
            let thinned = match self.plan.experts {
                ExpertCodec::Mxfp4zThinned { hundredths } => Some(hundredths),
                _ => None,
            };
            let keeps_all = thinned.is_none()
                && (form.is(matrix.codec) || matrix.codec.name == CodecName::Mxfp4z);
            let sample = match keeps_all {
                true => None,
                false => Some(Sample::of(form, (rows, cols), &stored).map_err(layout_error)?),
            };
            let (codes, scales) = match thinned {
                Some(hundredths) => {
                    let packed = thin(hundredths, form, (rows, cols), stored);
                    packed.map_err(layout_error)?
                }
                None => transcode(form, matrix.codec, shape, stored, &name, 0)?,
            };
            if let Some(sample) = sample {
                let codec = kernel_codec(matrix.codec).map_err(layout_error)?;
                let of_matrix = Matrix::accepted(codec, rows, cols, &codes, &scales, &[]);
                let of_matrix = sample.distance(&of_matrix.map_err(layout_error)?);
                distance.get_or_insert_with(Distance::default).add(of_matrix);
            }
            packed.push((codes, scales));
        }
        let code_bytes = std::array::from_fn(|index| packed[index].0.len() as u64);
        let own = layout.with_code_bytes(code_bytes).ok_or_else(|| ConvertError::Tensor {
            tensor: sources.name(bank, expert, 0),
            reason: "is not as long as its format and shape say; fetch the source again".to_owned(),
        })?;
        let mut record = vec![0; own.record_bytes];
        for (index, (codes, scales)) in packed.into_iter().enumerate() {
            let (code_part, scale_part) = own.matrix_mut(&mut record, index);
            code_part.copy_from_slice(&codes);
            scale_part.copy_from_slice(&scales);
        }
        let layer = self.plan.banks()[bank].layer;
        own.seal(&mut record, layer, expert);
        let made = whole(layout, &record, layer, expert, false);
        let made = made.expect("a record that was just sealed is right");
        if !self.target.banks.write(bank, expert, &record)? {
            return Ok(None);
        }
        if let Some(distance) = distance {
            let lost = &mut self.state.lock().expect("no worker panicked").lost[bank];
            lost.packed += 1;
            lost.distance.add(distance);
        }
        Ok(Some(made))
    }
}

/// Rows of a piece of a tensor of the trunk, in whole tiles, as if every weight took four bytes: the most it
/// can take on either side.
pub(crate) fn rows_per_piece(cols: u64) -> u64 {
    (PIECE_BYTES / (4 * cols).max(1) / MOST_TILE_ROWS).max(1) * MOST_TILE_ROWS
}

/// A multiple of the rows of every format's tiles.
const MOST_TILE_ROWS: u64 = 16;

/// Codes and scales of some rows in another format, or as they are when it is the same;
/// `first_row` is for messages.
fn transcode(
    form: Form,
    codec: container::Codec,
    (rows, cols): (u64, u64),
    (codes, scales): StoredBytes,
    tensor: &str,
    first_row: u64,
) -> Result<StoredBytes, ConvertError> {
    let layout_error = |source| ConvertError::Layout { tensor: tensor.to_owned(), source };
    let target = kernel_codec(codec).map_err(layout_error)?;
    let (rows, cols) = (rows as usize, cols as usize);
    if form.is(codec) {
        // Checks the scales as well: NaN must not get into a container.
        Matrix::new(target, rows, cols, &codes, &scales).map_err(layout_error)?;
        return Ok((codes, scales));
    }
    if let Codec::Trellis(trellis) = target {
        let packed = trellis::pack(trellis, form, (rows, cols), (codes, scales));
        return packed.map_err(layout_error);
    }
    if codec.name == CodecName::Mxfp4z {
        // Planned only of MXFP4, whose nibbles it has.
        let source = Matrix::new(Codec::Mxfp4, rows, cols, &codes, &scales);
        let mut packed = source.and_then(|s| Mxfp4zMatrix::encode(&s)).map_err(layout_error)?;
        packed.shrink_to_fit();
        return Ok((packed, Vec::new()));
    }
    let row = target.layout(1, cols).map_err(layout_error)?;
    let weights = form.decode(rows, cols, &codes, &scales).map_err(layout_error)?;
    let (mut codes, mut scales) = (vec![0; rows * row.codes], vec![0; rows * row.scales]);
    for (r, weights) in weights.chunks_exact(cols.max(1)).enumerate() {
        let codes = &mut codes[r * row.codes..][..row.codes];
        let scales = &mut scales[r * row.scales..][..row.scales];
        target.encode_row(weights, codes, scales).map_err(|source| ConvertError::Encode {
            tensor: tensor.to_owned(),
            row: first_row + r as u64,
            source,
        })?;
    }
    Ok((codes, scales))
}

/// Codes of an MXFP4 matrix in any of its forms as mxfp4z with a little loss.
fn thin(
    hundredths: u16,
    form: Form,
    (rows, cols): (usize, usize),
    stored: StoredBytes,
) -> Result<StoredBytes, LayoutError> {
    let (codec, codes, scales) = trellis::by_rows(form, (rows, cols), stored)?;
    let source = Matrix::new(codec, rows, cols, &codes, &scales)?;
    let (codes, scales) = Mxfp4zMatrix::thinned(&source, hundredths)?;
    let mut packed =
        Mxfp4zMatrix::encode(&Matrix::new(Codec::Mxfp4, rows, cols, &codes, &scales)?)?;
    packed.shrink_to_fit();
    Ok((packed, Vec::new()))
}

/// Writes a run in order and sums it up.
struct RunWriter<'a> {
    target: &'a Target,
    /// Where the run starts in its file.
    base: u64,
    at: u64,
    sum: Checksum,
}

impl RunWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        self.target.trunk.write_at(bytes, self.base + self.at)?;
        self.sum.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn pad_to(&mut self, at: u64) -> Result<(), ConvertError> {
        self.write(&vec![0; (at - self.at) as usize])
    }
}

/// The destination folder with its files open.
struct Target {
    folder: PathBuf,
    trunk: OutFile,
    banks: Banks,
    /// Held, and locked, until the end.
    _note: Note,
    log: Mutex<LineFile>,
    /// Checksums of runs that an earlier process finished.
    finished_runs: HashMap<usize, u64>,
    /// Lines about files of the source that an earlier process found to be as published.
    checked: HashSet<String>,
}

impl Target {
    /// Opens or makes the files; `None` when the container is whole already.
    fn prepare(
        folder: &Path,
        plan: &Plan,
        source: &dyn ConvertSource,
        work: &Work,
        saving_bytes: u64,
    ) -> Result<Option<Self>, ConvertError> {
        let name = folder.display().to_string();
        let io_error = |doing, source| ConvertError::Io { file: name.clone(), doing, source };
        fs::create_dir_all(folder).map_err(|e| io_error("making the folder", e))?;
        let begun = folder.join(NOTE).exists();
        if !begun && folder.join(MANIFEST).exists() {
            reclaim::remove_notes(folder)?;
            return Err(ConvertError::Exists { folder: name });
        }
        if !begun && fs::read_dir(folder).map_err(|e| io_error("listing it", e))?.next().is_some() {
            return Err(ConvertError::NotEmpty { folder: name });
        }
        for directory in &plan.manifest.directories {
            let path = folder.join(directory);
            fs::create_dir_all(&path).map_err(|e| self::io_error(&path, "making the folder", e))?;
        }
        let stripes = plan.banks().iter().flat_map(|bank| &bank.stripes);
        if let Some(path) = stripes
            .map(|stripe| stripe_path(folder, plan, stripe))
            .find(|path| !begun && path.exists())
        {
            return Err(ConvertError::NotEmpty { folder: path.display().to_string() });
        }
        // Before the note, which would commit the folder to a plan that does not fit.
        check_space(folder, plan, saving_bytes)?;
        let mut note = Note::lock(folder, plan)?;
        if folder.join(MANIFEST).exists() {
            // Killed with nothing left to do but this, or another process has just ended.
            remove_notes(folder)?;
            return Ok(None);
        }
        let trunk = OutFile::open(folder.join(&plan.manifest.trunk.file), plan.trunk_bytes())?;
        let (mut log, log_text) = LineFile::open(folder.join(LOG))?;
        let mut finished_runs = parse_log(&log_text);

        let source_folder = source.folder();
        let now: Vec<SourceFile> =
            work.files.iter().filter_map(|name| SourceFile::find(&source_folder, name)).collect();
        // A shard that was deleted and fetched again is as good as it was.
        let gone = reclaim::deleted_shards(folder)?;
        let changed: HashSet<String> =
            note.changed(&now).into_iter().filter(|name| !gone.contains(name)).collect();
        let stale = |read: &[usize]| read.iter().any(|&f| changed.contains(&work.files[f]));
        let mut stale_records = HashSet::new();
        for (task, _) in work.tasks.iter().filter(|(_, read)| stale(read)) {
            match *task {
                Task::Check(_) => {}
                Task::Run(index) => {
                    log.append(&format!("{index} -"))?;
                    finished_runs.remove(&index);
                }
                Task::Record { bank, expert } => drop(stale_records.insert((bank, expert))),
            }
        }
        let banks = Banks::open(folder, plan, &work.orders(plan), &|bank, expert| {
            stale_records.contains(&(bank, expert))
        })?;
        if !changed.is_empty() {
            banks.sync()?;
        }
        note.update(&now)?;
        Ok(Some(Self {
            folder: folder.to_owned(),
            trunk,
            banks,
            _note: note,
            log: Mutex::new(log),
            finished_runs,
            checked: log_text.lines().map(str::to_owned).collect(),
        }))
    }

    /// The checksum of a run that an earlier process finished, if its bytes still have it.
    fn finished_run(&self, index: usize, run: &Run) -> Result<Option<u64>, ConvertError> {
        let Some(&noted) = self.finished_runs.get(&index) else { return Ok(None) };
        Ok((self.run_checksum(run)? == noted).then_some(noted))
    }

    /// The checksum of a run as it is in the file.
    fn run_checksum(&self, run: &Run) -> Result<u64, ConvertError> {
        let mut sum = Checksum::default();
        let mut at = 0;
        while at < run.bytes {
            let mut piece = vec![0; PIECE_BYTES.min(run.bytes - at) as usize];
            self.trunk.read_at(&mut piece, run.offset + at)?;
            sum.update(&piece);
            at += piece.len() as u64;
        }
        Ok(sum.finish())
    }

    /// Makes durable what some tasks have written, and lets it be read from the drive again.
    fn sync(&self, tasks: &[Task]) -> Result<(), ConvertError> {
        let mut files: Vec<&OutFile> = Vec::new();
        if tasks.iter().any(|task| matches!(task, Task::Run(_))) {
            files.push(&self.trunk);
        }
        let banks: HashSet<usize> = tasks
            .iter()
            .filter_map(|task| match task {
                Task::Record { bank, .. } => Some(*bank),
                _ => None,
            })
            .collect();
        files.extend(banks.iter().flat_map(|&bank| self.banks.files(bank)));
        for file in files {
            file.sync()?;
            file.drop_cached();
            // The file's name as well.
            file.path.parent().map_or(Ok(()), sync_folder)?;
        }
        Ok(())
    }

    fn note_run(&self, index: usize, checksum: u64) -> Result<(), ConvertError> {
        // The bytes before the note: after a power cut the note must not be all that is left.
        self.trunk.sync()?;
        let mut log = self.log.lock().expect("no worker panicked");
        log.append(&format!("{index} {}", hex(checksum)))
    }

    /// Syncs everything and writes the manifest, which makes the folder a container.
    fn finish(self, plan: &Plan, state: &State) -> Result<(), ConvertError> {
        for (file, bytes) in plan.manifest.files.iter().zip(&plan.small_files) {
            let out = OutFile::open(self.folder.join(&file.name), 0)?;
            out.write_at(bytes, 0)?;
            out.sync()?;
        }
        self.trunk.sync()?;
        self.banks.sync()?;
        let mut manifest = plan.manifest.clone();
        for (run, &checksum) in manifest.trunk.runs.iter_mut().zip(&state.run_checksums) {
            run.checksum = hex(checksum);
        }
        if let (Some(experts), Some(layout)) = (&mut manifest.experts, &plan.layout)
            && layout.varies()
        {
            let records = || state.records.iter().flatten();
            let most = |i: usize| records().map(|record| record.code_bytes[i]).max().unwrap_or(0);
            experts.gate.code_bytes = most(0);
            experts.up.code_bytes = most(1);
            experts.down.code_bytes = most(2);
            experts.record_bytes = records().map(|record| record.bytes).max().unwrap_or(0);
            for (bank, places) in experts.banks.iter_mut().zip(self.banks.places()) {
                bank.records = places;
            }
        }
        let files = plan.small_files.iter().map(|bytes| rill_format::container::checksum(bytes));
        let records = state.records.iter().flatten().map(|record| record.checksum);
        manifest.fingerprint =
            fingerprint(files.chain(state.run_checksums.iter().copied()).chain(records));
        let aside = OutFile::open(self.folder.join("manifest.json.part"), 0)?;
        aside.write_at(&manifest.to_bytes(), 0)?;
        aside.move_into_place(&self.folder.join(MANIFEST))?;
        remove_notes(&self.folder)
    }
}

/// Refuses a destination inside the source: a published checkpoint must survive whatever becomes of
/// its conversion.
fn check_apart(source: &Folder, destination: &Path, plan: &Plan) -> Result<(), ConvertError> {
    let Folder::Disk(source) = source else { return Ok(()) };
    let Ok(source) = fs::canonicalize(source) else { return Ok(()) };
    for directory in &plan.manifest.directories {
        let folder = destination.join(directory);
        if resolve(&folder).starts_with(&source) {
            let (folder, source) = (folder.display().to_string(), source.display().to_string());
            return Err(ConvertError::InSource { folder, source_folder: source });
        }
    }
    Ok(())
}

/// Where a folder lies or would lie, links resolved.
fn resolve(folder: &Path) -> PathBuf {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let there = folder.ancestors().find_map(|there| Some((there, fs::canonicalize(there).ok()?)));
    let Some((there, mut resolved)) = there else { return folder };
    for part in folder.strip_prefix(there).expect("an ancestor is a prefix").components() {
        match part {
            // Out of a folder that is not there yet, so no link.
            Component::ParentDir => drop(resolved.pop()),
            part => resolved.push(part),
        }
    }
    resolved
}

/// The container is whole; left-over notes would only puzzle.
fn remove_notes(folder: &Path) -> Result<(), ConvertError> {
    remove_files(folder, &[LOG, NOTE])?;
    // Last: while there is a note, shards must not be missed.
    reclaim::remove_notes(folder)
}

/// Reads `run checksum` from each line that says so, the last for each run. `run -` takes it back.
fn parse_log(text: &str) -> HashMap<usize, u64> {
    let mut runs = HashMap::new();
    for line in text.lines() {
        let Some((run, checksum)) = line.split_once(' ') else { continue };
        let Ok(run) = run.parse() else { continue };
        match (checksum.len(), u64::from_str_radix(checksum, 16)) {
            (16, Ok(checksum)) => drop(runs.insert(run, checksum)),
            _ => drop(runs.remove(&run)),
        }
    }
    runs
}

/// Removes files that need not be there.
pub(crate) fn remove_files(folder: &Path, names: &[&str]) -> Result<(), ConvertError> {
    for name in names {
        let path = folder.join(name);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(io_error(&path, "removing it", e));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Where a stripe lies.
pub(crate) fn stripe_path(folder: &Path, plan: &Plan, stripe: &Stripe) -> PathBuf {
    folder.join(&plan.manifest.directories[stripe.directory]).join(&stripe.file)
}

/// Refuses to begin what cannot be finished. Folders on one drive are not added up: then the disk
/// fills up, and the conversion can be resumed. What shards give back is counted for the container's
/// own folder only, and cautiously: see [`reclaim::saving_bytes`].
fn check_space(folder: &Path, plan: &Plan, saving_bytes: u64) -> Result<(), ConvertError> {
    let mut needed = plan.bytes_per_directory();
    needed[0] = needed[0].saturating_sub(saving_bytes);
    for (directory, bytes) in plan.manifest.directories.iter().zip(needed) {
        let folder = folder.join(directory);
        let Some(available_bytes) = available_bytes(&folder) else { continue };
        let present = fs::read_dir(&folder).map(|entries| {
            let files = entries.flatten().filter_map(|e| e.metadata().ok());
            files.map(|m| allocated_bytes(&m)).sum()
        });
        let needed_bytes = bytes.saturating_sub(present.unwrap_or(0u64));
        if needed_bytes > available_bytes {
            let folder = folder.display().to_string();
            return Err(ConvertError::NoSpace { folder, needed_bytes, available_bytes });
        }
    }
    Ok(())
}
