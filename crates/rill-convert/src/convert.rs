//! Carrying a plan out.
//!
//! The destination first gets `convert.json`, which names the plan and is locked while a process
//! is at work. Files are made at their final size; every run and every record is a task of its
//! own that writes its own bytes, so the result does not depend on order or number of threads. A
//! record that is whole proves itself by its checksums; a finished run is noted in `convert.log`
//! with its checksum and is checked against it. When all is done and synced, the manifest is
//! written, and the two notes are removed.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rill_format::Folder;
use rill_format::container::{
    self, Checksum, MANIFEST, Run, Stripe, TrunkTensor, fingerprint, hex,
};
use rill_kernels::Matrix;

use crate::error::ConvertError;
use crate::plan::Plan;
use crate::source::{ConvertSource, Form, SourceTensor, StoredBytes, kernel_codec};

const NOTE: &str = "convert.json";
const LOG: &str = "convert.log";
/// Source bytes that one task holds at a time while it works through a tensor of the trunk.
const PIECE_BYTES: u64 = 16 << 20;

/// How far a conversion has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the container that are written.
    pub done_bytes: u64,
    /// Of these, bytes that an earlier run had written.
    pub resumed_bytes: u64,
    /// Bytes of the container.
    pub total_bytes: u64,
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
/// Peak memory is about one expert's source and record plus 32 MB for each job.
///
/// # Errors
/// See [`ConvertError`]; after any of them the same call goes on where it stopped.
pub fn convert(
    source: &dyn ConvertSource,
    plan: &Plan,
    destination: &Path,
    control: &Control<'_>,
) -> Result<(), ConvertError> {
    check_apart(&source.folder(), destination, plan)?;
    source.check()?;
    let Some(target) = Target::prepare(destination, plan)? else { return Ok(()) };
    let tasks = target.tasks(plan);
    let job = Job {
        source,
        plan,
        target: &target,
        control,
        state: Mutex::new(State {
            progress: Progress {
                done_bytes: 0,
                resumed_bytes: 0,
                total_bytes: plan.container_bytes(),
            },
            run_checksums: vec![0; plan.manifest.trunk.runs.len()],
            record_checksums: plan.banks().iter().map(|b| vec![0; b.experts as usize]).collect(),
        }),
        stop: AtomicBool::new(false),
    };
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), ConvertError> {
        while !job.stop.load(Ordering::Relaxed) {
            let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            job.run(task).inspect_err(|_| job.stop.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..control.jobs.max(1)).map(|_| scope.spawn(work)).collect();
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
    Run(usize),
    Record { bank: usize, expert: u32 },
}

/// What the workers share.
struct Job<'a> {
    source: &'a dyn ConvertSource,
    plan: &'a Plan,
    target: &'a Target,
    control: &'a Control<'a>,
    state: Mutex<State>,
    stop: AtomicBool,
}

struct State {
    progress: Progress,
    run_checksums: Vec<u64>,
    /// Per bank and expert.
    record_checksums: Vec<Vec<u64>>,
}

impl Job<'_> {
    fn run(&self, task: &Task) -> Result<(), ConvertError> {
        match *task {
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
                self.done(run.bytes, finished.is_some(), |state| {
                    state.run_checksums[index] = checksum;
                })
            }
            Task::Record { bank, expert } => {
                let finished = self.target.finished_record(self.plan, bank, expert)?;
                let checksum = match finished {
                    Some(checksum) => checksum,
                    None => self.write_record(bank, expert)?,
                };
                self.done(self.plan.record_bytes(), finished.is_some(), |state| {
                    state.record_checksums[bank][expert as usize] = checksum;
                })
            }
        }
    }

    fn done(
        &self,
        bytes: u64,
        resumed: bool,
        record: impl FnOnce(&mut State),
    ) -> Result<(), ConvertError> {
        let progress = {
            let mut state = self.state.lock().expect("no worker panicked");
            record(&mut state);
            state.progress.done_bytes += bytes;
            if resumed {
                state.progress.resumed_bytes += bytes;
            }
            state.progress
        };
        match (self.control.progress)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ConvertError::Cancelled),
        }
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
        // As if every weight took four bytes: the most it can take on either side.
        let rows_per_piece = (PIECE_BYTES / (4 * cols).max(1)).max(1);
        let mut scales = Vec::new();
        let mut row = 0;
        while row < rows {
            let n = rows_per_piece.min(rows - row);
            let stored = self.source.read_rows(source, row, n)?;
            let piece = transcode(source.form, tensor.codec, (n, cols), stored, &tensor.name, row)?;
            out.write(&piece.0)?;
            scales.extend(piece.1);
            row += n;
        }
        Ok(scales)
    }

    /// Builds one record, writes it and returns its payload's checksum.
    fn write_record(&self, bank: usize, expert: u32) -> Result<u64, ConvertError> {
        let layout = self.plan.layout.as_ref().expect("banks have a layout");
        let sources = self.plan.expert_sources.as_ref().expect("banks have sources");
        let mut record = vec![0; layout.record_bytes];
        let parts = self.source.read_expert(sources, bank, expert)?;
        for (index, stored) in parts.into_iter().enumerate() {
            let matrix = &layout.matrices[index];
            let name = sources.name(bank, expert, index);
            let form = sources.matrices[index].form;
            let shape = (matrix.rows, matrix.cols);
            let (codes, scales) = transcode(form, matrix.codec, shape, stored, &name, 0)?;
            let (code_part, scale_part) = layout.matrix_mut(&mut record, index);
            code_part.copy_from_slice(&codes);
            scale_part.copy_from_slice(&scales);
        }
        let layer = self.plan.banks()[bank].layer;
        layout.seal(&mut record, layer, expert);
        let checksum = layout
            .check(&record, layer, expert, false)
            .expect("a record that was just sealed is right");
        self.target.write_record(bank, expert, &record)?;
        Ok(checksum)
    }
}

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
    let target = kernel_codec(codec);
    let (rows, cols) = (rows as usize, cols as usize);
    let row = target.layout(1, cols).map_err(layout_error)?;
    if form.is(codec) {
        // Checks the scales as well: NaN must not get into a container.
        Matrix::new(target, rows, cols, &codes, &scales).map_err(layout_error)?;
        return Ok((codes, scales));
    }
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
    /// Per bank and stripe: the file, and the bytes of each record that lie there.
    banks: Vec<Vec<(OutFile, usize)>>,
    /// Held, and locked, until the end.
    _note: File,
    log: Mutex<OutFile>,
    /// Checksums of runs that an earlier process finished.
    finished_runs: HashMap<usize, u64>,
}

impl Target {
    /// Opens or makes the files; `None` when the container is whole already.
    fn prepare(folder: &Path, plan: &Plan) -> Result<Option<Self>, ConvertError> {
        let name = folder.display().to_string();
        let io_error = |doing, source| ConvertError::Io { file: name.clone(), doing, source };
        fs::create_dir_all(folder).map_err(|e| io_error("making the folder", e))?;
        let begun = folder.join(NOTE).exists();
        if !begun && folder.join(MANIFEST).exists() {
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
        check_space(folder, plan)?;
        let note = lock_note(folder, plan)?;
        if folder.join(MANIFEST).exists() {
            // Killed with nothing left to do but this, or another process has just ended.
            remove_notes(folder)?;
            return Ok(None);
        }
        let trunk = OutFile::open(folder.join(&plan.manifest.trunk.file), plan.trunk_bytes())?;
        let banks = plan.banks().iter().map(|bank| {
            let open = |stripe: &Stripe| {
                let path = stripe_path(folder, plan, stripe);
                let bytes = stripe.bytes * u64::from(bank.experts);
                Ok((OutFile::open(path, bytes)?, stripe.bytes as usize))
            };
            bank.stripes.iter().map(open).collect()
        });
        let banks = banks.collect::<Result<_, ConvertError>>()?;
        let log_path = folder.join(LOG);
        let log_text = fs::read_to_string(&log_path).unwrap_or_default();
        Ok(Some(Self {
            folder: folder.to_owned(),
            trunk,
            banks,
            _note: note,
            log: Mutex::new(OutFile::append(log_path)?),
            finished_runs: parse_log(&log_text),
        }))
    }

    fn tasks(&self, plan: &Plan) -> Vec<Task> {
        let runs = (0..plan.manifest.trunk.runs.len()).map(Task::Run);
        let records =
            plan.banks().iter().enumerate().flat_map(|(bank, b)| {
                (0..b.experts).map(move |expert| Task::Record { bank, expert })
            });
        runs.chain(records).collect()
    }

    /// The checksum of a run that an earlier process finished, if its bytes still have it.
    fn finished_run(&self, index: usize, run: &Run) -> Result<Option<u64>, ConvertError> {
        let Some(&noted) = self.finished_runs.get(&index) else { return Ok(None) };
        let mut sum = Checksum::default();
        let mut at = 0;
        while at < run.bytes {
            let mut piece = vec![0; PIECE_BYTES.min(run.bytes - at) as usize];
            self.trunk.read_at(&mut piece, run.offset + at)?;
            sum.update(&piece);
            at += piece.len() as u64;
        }
        Ok((sum.finish() == noted).then_some(noted))
    }

    fn note_run(&self, index: usize, checksum: u64) -> Result<(), ConvertError> {
        // The bytes before the note: after a power cut the note must not be all that is left.
        self.trunk.sync()?;
        let mut log = self.log.lock().expect("no worker panicked");
        log.append_line(&format!("{index} {}\n", hex(checksum)))
    }

    /// The payload's checksum of a record that is whole already.
    fn finished_record(
        &self,
        plan: &Plan,
        bank: usize,
        expert: u32,
    ) -> Result<Option<u64>, ConvertError> {
        let layout = plan.layout.as_ref().expect("banks have a layout");
        let mut record = vec![0; layout.record_bytes];
        let mut rest = &mut record[..];
        for (index, (file, bytes)) in self.banks[bank].iter().enumerate() {
            let first = index == 0;
            let (part, after) = rest.split_at_mut(*bytes);
            let position = u64::from(expert) * *bytes as u64;
            // Most records of a fresh file are zeros: the start tells without reading the rest.
            let start = part.len().min(rill_format::container::HEADER_BYTES);
            file.read_at(&mut part[..start], position)?;
            if part[..start].iter().all(|&b| b == 0) && first {
                return Ok(None);
            }
            file.read_at(part, position)?;
            rest = after;
        }
        Ok(layout.check(&record, plan.banks()[bank].layer, expert, true).ok())
    }

    fn write_record(&self, bank: usize, expert: u32, record: &[u8]) -> Result<(), ConvertError> {
        let mut rest = record;
        for (file, bytes) in &self.banks[bank] {
            let (part, after) = rest.split_at(*bytes);
            file.write_at(part, u64::from(expert) * *bytes as u64)?;
            rest = after;
        }
        Ok(())
    }

    /// Syncs everything and writes the manifest, which makes the folder a container.
    fn finish(self, plan: &Plan, state: &State) -> Result<(), ConvertError> {
        for (file, bytes) in plan.manifest.files.iter().zip(&plan.small_files) {
            let out = OutFile::open(self.folder.join(&file.name), 0)?;
            out.write_at(bytes, 0)?;
            out.sync()?;
        }
        self.trunk.sync()?;
        for (stripe, _) in self.banks.iter().flatten() {
            stripe.sync()?;
        }
        let mut manifest = plan.manifest.clone();
        for (run, &checksum) in manifest.trunk.runs.iter_mut().zip(&state.run_checksums) {
            run.checksum = hex(checksum);
        }
        let files = plan.small_files.iter().map(|bytes| rill_format::container::checksum(bytes));
        let records = state.record_checksums.iter().flatten().copied();
        manifest.fingerprint =
            fingerprint(files.chain(state.run_checksums.iter().copied()).chain(records));
        let aside = OutFile::open(self.folder.join("manifest.json.part"), 0)?;
        aside.write_at(&manifest.to_bytes(), 0)?;
        aside.sync()?;
        let path = self.folder.join(MANIFEST);
        let rename = fs::rename(&aside.path, &path);
        rename.map_err(|e| io_error(&path, "moving the manifest into place", e))?;
        sync_folder(&self.folder)?;
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
    for note in [LOG, NOTE] {
        let path = folder.join(note);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(io_error(&path, "removing it", e));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Opens or makes the note that names the plan, and locks it.
fn lock_note(folder: &Path, plan: &Plan) -> Result<File, ConvertError> {
    let path = folder.join(NOTE);
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let mut note = open.map_err(|e| io_error(&path, "opening", e))?;
    match note.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(ConvertError::Busy { folder: folder.display().to_string() });
        }
        Err(TryLockError::Error(e)) => return Err(io_error(&path, "locking", e)),
    }
    let expected = serde_json::json!({
        "experts": plan.experts, "trunk": plan.trunk, "identity": plan.identity,
    });
    let expected = format!("{expected}\n");
    let mut found = String::new();
    note.read_to_string(&mut found).map_err(|e| io_error(&path, "reading", e))?;
    // Killed between making and writing it: nothing else has been written yet.
    if found.is_empty() || !found.ends_with('\n') {
        note.set_len(0).map_err(|e| io_error(&path, "writing", e))?;
        io::Seek::rewind(&mut note).map_err(|e| io_error(&path, "writing", e))?;
        note.write_all(expected.as_bytes()).map_err(|e| io_error(&path, "writing", e))?;
        note.sync_all().map_err(|e| io_error(&path, "syncing", e))?;
    } else if found != expected {
        return Err(ConvertError::OtherPlan { folder: folder.display().to_string() });
    }
    Ok(note)
}

/// Lines `run checksum`; a line cut off by a crash is not one.
fn parse_log(text: &str) -> HashMap<usize, u64> {
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole
        .filter_map(|line| {
            let (index, checksum) = line.trim_end().split_once(' ')?;
            let checksum = (checksum.len() == 16).then_some(checksum)?;
            Some((index.parse().ok()?, u64::from_str_radix(checksum, 16).ok()?))
        })
        .collect()
}

/// Where a stripe lies.
fn stripe_path(folder: &Path, plan: &Plan, stripe: &Stripe) -> PathBuf {
    folder.join(&plan.manifest.directories[stripe.directory]).join(&stripe.file)
}

/// Refuses to begin what cannot be finished. Folders on one drive are not added up: then the disk
/// fills up, and the conversion can be resumed.
fn check_space(folder: &Path, plan: &Plan) -> Result<(), ConvertError> {
    for (directory, bytes) in plan.manifest.directories.iter().zip(plan.bytes_per_directory()) {
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

#[cfg(unix)]
pub(crate) fn available_bytes(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(not(unix))]
pub(crate) fn available_bytes(_folder: &Path) -> Option<u64> {
    None
}

#[cfg(unix)]
fn allocated_bytes(metadata: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(metadata) * 512
}

#[cfg(not(unix))]
fn allocated_bytes(metadata: &fs::Metadata) -> u64 {
    metadata.len()
}

pub(crate) fn io_error(path: &Path, doing: &'static str, source: io::Error) -> ConvertError {
    ConvertError::Io { file: path.display().to_string(), doing, source }
}

/// Makes a rename in the folder durable.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), ConvertError> {
    #[cfg(unix)]
    {
        let sync = File::open(folder).and_then(|folder| folder.sync_all());
        sync.map_err(|e| io_error(folder, "syncing", e))?;
    }
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

/// A file that is written at positions.
pub(crate) struct OutFile {
    pub(crate) path: PathBuf,
    file: File,
}

impl OutFile {
    /// Opens or makes a file and gives it a size; what it holds is kept.
    pub(crate) fn open(path: PathBuf, bytes: u64) -> Result<Self, ConvertError> {
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = open.map_err(|e| io_error(&path, "opening", e))?;
        file.set_len(bytes).map_err(|e| io_error(&path, "setting its size", e))?;
        Ok(Self { path, file })
    }

    fn append(path: PathBuf) -> Result<Self, ConvertError> {
        let open = OpenOptions::new().append(true).create(true).open(&path);
        let file = open.map_err(|e| io_error(&path, "opening", e))?;
        Ok(Self { path, file })
    }

    fn append_line(&mut self, line: &str) -> Result<(), ConvertError> {
        let write = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_all());
        write.map_err(|e| io_error(&self.path, "writing", e))
    }

    #[cfg(unix)]
    pub(crate) fn write_at(&self, bytes: &[u8], position: u64) -> Result<(), ConvertError> {
        std::os::unix::fs::FileExt::write_all_at(&self.file, bytes, position)
            .map_err(|e| io_error(&self.path, "writing", e))
    }

    #[cfg(windows)]
    pub(crate) fn write_at(&self, mut bytes: &[u8], mut position: u64) -> Result<(), ConvertError> {
        while !bytes.is_empty() {
            let n = std::os::windows::fs::FileExt::seek_write(&self.file, bytes, position)
                .map_err(|e| io_error(&self.path, "writing", e))?;
            bytes = &bytes[n..];
            position += n as u64;
        }
        Ok(())
    }

    #[cfg(unix)]
    fn read_at(&self, out: &mut [u8], position: u64) -> Result<(), ConvertError> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, out, position)
            .map_err(|e| io_error(&self.path, "reading back", e))
    }

    #[cfg(windows)]
    fn read_at(&self, mut out: &mut [u8], mut position: u64) -> Result<(), ConvertError> {
        while !out.is_empty() {
            let n = std::os::windows::fs::FileExt::seek_read(&self.file, out, position)
                .map_err(|e| io_error(&self.path, "reading back", e))?;
            if n == 0 {
                let end = io::ErrorKind::UnexpectedEof.into();
                return Err(io_error(&self.path, "reading back", end));
            }
            out = &mut out[n..];
            position += n as u64;
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<(), ConvertError> {
        self.file.sync_all().map_err(|e| io_error(&self.path, "syncing", e))
    }
}
