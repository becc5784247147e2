//! The `.rill` container: one aligned record per expert, one aligned run per layer, a checksum over
//! every byte. `docs/format.md` is its specification.

mod manifest;
mod record;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use manifest::Refused;
pub use manifest::{
    Bank, Codec, CodecName, Experts, Manifest, Matrix, Run, SmallFile, Stripe, Trunk, TrunkTensor,
};
pub use record::{HEADER_BYTES, Mismatch, RecordLayout};
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::read_at::Source;
use crate::{DataExtent, DataFile, Folder, FormatError};

/// Version of the format that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// Alignment of records and runs, in bytes: a multiple of every page and sector size in use.
pub const ALIGN: usize = 16 << 10;
/// Alignment of the parts of a record and of a run, in bytes.
pub const PART_ALIGN: usize = 64;
/// Name of the file that makes a folder a container.
pub const MANIFEST: &str = "manifest.json";
/// Name that converters give the file of the trunk.
pub const TRUNK: &str = "trunk.rill";

/// Largest manifest that makes sense: K3's has about 2,000 tensors and 92 banks.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;
/// Largest small file that makes sense.
const MAX_SMALL_BYTES: u64 = 256 << 20;
/// Bytes of a trunk run that are read at a time while it is verified.
const VERIFY_BYTES: usize = 8 << 20;

/// Checksum of some bytes.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// A checksum over bytes that come piece by piece.
#[derive(Clone, Default)]
pub struct Checksum(XxHash3_64);

impl Checksum {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        std::hash::Hasher::write(&mut self.0, bytes);
    }

    /// The checksum of all bytes added.
    pub fn finish(&self) -> u64 {
        std::hash::Hasher::finish(&self.0)
    }
}

/// A checksum as the manifest writes it.
pub fn hex(checksum: u64) -> String {
    format!("{checksum:016x}")
}

/// The fingerprint of weights: of the checksums of the small files, of the runs and of the
/// experts' payloads, in the manifest's order.
pub fn fingerprint(checksums: impl IntoIterator<Item = u64>) -> String {
    let bytes: Vec<u8> = checksums.into_iter().flat_map(u64::to_le_bytes).collect();
    format!("{:032x}", XxHash3_128::oneshot(&bytes))
}

/// An open container: immutable, shared between threads.
#[derive(Debug)]
pub struct Container {
    folder: PathBuf,
    manifest: Manifest,
    layout: Option<RecordLayout>,
    trunk: Source,
    /// By ascending layer.
    banks: Vec<BankFiles>,
    /// Index of a layer's bank.
    bank_of_layer: HashMap<u32, usize>,
    /// Run and index of each trunk tensor.
    tensors: HashMap<String, (usize, usize)>,
}

/// A bank's open files.
#[derive(Debug)]
struct BankFiles {
    /// One for each stripe.
    stripes: Vec<Source>,
    /// Of every expert, in each stripe: where its record begins. Empty where all have the same size.
    starts: Vec<u64>,
}

impl Container {
    /// Whether a folder is a container, be it one whose manifest is damaged: then opening it says so.
    pub fn is_container(folder: &Path) -> bool {
        let own = Folder::Disk(folder.to_owned());
        let says_so = own.read(MANIFEST, MAX_MANIFEST_BYTES).is_ok_and(|bytes| {
            let text = String::from_utf8_lossy(&bytes);
            text.contains("\"format\": \"rill\"")
        });
        says_so || own.exists(MANIFEST) && own.exists(TRUNK)
    }

    /// Opens a container: checks the manifest, the size of every file and the small files.
    ///
    /// # Errors
    /// When anything differs from `docs/format.md`, or a file cannot be read.
    pub fn open(folder: PathBuf) -> Result<Self, FormatError> {
        let own = Folder::Disk(folder.clone());
        let bytes = own.read(MANIFEST, MAX_MANIFEST_BYTES)?;
        let (manifest, layout) = Manifest::parse(&bytes).map_err(|refused| match refused {
            Refused::Version(found) => FormatError::ContainerVersion {
                file: own.describe(MANIFEST),
                expected: VERSION,
                found,
            },
            Refused::Wrong(wrong) => FormatError::Container {
                file: own.describe(MANIFEST),
                what: wrong.field,
                expected: wrong.expected,
                found: wrong.found,
            },
        })?;
        let open = |directory: usize, file: &str, bytes: u64| {
            let folder = Folder::Disk(folder.join(&manifest.directories[directory]));
            let source = folder.open(file)?;
            let found = source.len().map_err(|e| folder.io_error(file, "taking its size", e))?;
            if found != bytes {
                return Err(FormatError::Container {
                    file: folder.describe(file),
                    what: "its size".to_owned(),
                    expected: format!("{bytes} bytes"),
                    found: format!("{found} bytes"),
                });
            }
            Ok(source)
        };
        for file in &manifest.files {
            let bytes = own.read(&file.name, file.bytes.min(MAX_SMALL_BYTES))?;
            check_sum(&own.describe(&file.name), "its checksum", &file.checksum, checksum(&bytes))?;
        }
        let trunk = open(manifest.trunk.directory, &manifest.trunk.file, manifest.trunk.bytes)?;
        let mut banks = Vec::new();
        let mut bank_of_layer = HashMap::new();
        for bank in manifest.experts.iter().flat_map(|experts| &experts.banks) {
            bank_of_layer.insert(bank.layer, banks.len());
            let stripes = bank.stripes.iter().zip(bank.file_bytes());
            let stripes =
                stripes.map(|(stripe, bytes)| open(stripe.directory, &stripe.file, bytes));
            banks.push(BankFiles {
                stripes: stripes.collect::<Result<_, _>>()?,
                starts: record_starts(bank),
            });
        }
        let mut tensors = HashMap::new();
        for (r, run) in manifest.trunk.runs.iter().enumerate() {
            for (t, tensor) in run.tensors.iter().enumerate() {
                tensors.insert(tensor.name.clone(), (r, t));
            }
        }
        Ok(Self { folder, manifest, layout, trunk, banks, bank_of_layer, tensors })
    }

    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The container's own folder, where the small files are.
    pub fn folder(&self) -> Folder {
        Folder::Disk(self.folder.clone())
    }

    /// Where the parts of a record lie; `None` for a model without routed experts.
    pub fn layout(&self) -> Option<&RecordLayout> {
        self.layout.as_ref()
    }

    /// Experts of a layer; 0 for a layer without.
    pub fn experts(&self, layer: u32) -> u32 {
        let bank = self.bank_of_layer.get(&layer).map(|&bank| &self.bank_list()[bank]);
        bank.map_or(0, |bank| bank.experts)
    }

    /// A tensor of the trunk.
    pub fn find(&self, name: &str) -> Option<&TrunkTensor> {
        let &(run, tensor) = self.tensors.get(name)?;
        Some(&self.manifest.trunk.runs[run].tensors[tensor])
    }

    /// Codes and scales of a tensor of the trunk.
    ///
    /// # Errors
    /// When the container has no such tensor, or it cannot be read.
    pub fn read_tensor(&self, name: &str) -> Result<(Vec<u8>, Vec<u8>), FormatError> {
        let (run, tensor) = self.locate(name)?;
        let mut codes = self.buffer(name, tensor.code_bytes)?;
        let mut scales = self.buffer(name, tensor.scale_bytes)?;
        self.read_trunk(run.offset + tensor.offset, &mut codes, name)?;
        self.read_trunk(run.offset + tensor.scale_offset(), &mut scales, name)?;
        Ok((codes, scales))
    }

    /// Part of a tensor's codes (`scales` false) or scales, from byte `start` of them.
    ///
    /// # Errors
    /// When the container has no such tensor, the part is not inside it, or it cannot be read.
    pub fn read_part(
        &self,
        name: &str,
        scales: bool,
        start: u64,
        out: &mut [u8],
    ) -> Result<(), FormatError> {
        let (run, tensor) = self.locate(name)?;
        let (offset, bytes) = match scales {
            false => (tensor.offset, tensor.code_bytes),
            true => (tensor.scale_offset(), tensor.scale_bytes),
        };
        let end = start.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > bytes) {
            return Err(FormatError::Container {
                file: self.trunk_file(),
                what: format!("the part of tensor {name:?} asked for"),
                expected: format!("at most {bytes} bytes"),
                found: format!("{} bytes from byte {start}", out.len()),
            });
        }
        self.read_trunk(run.offset + offset + start, out, name)
    }

    /// Bytes of a record; 0 when there is no such expert.
    pub fn record_bytes(&self, layer: u32, expert: u32) -> usize {
        let Some(&bank) = self.bank_of_layer.get(&layer) else { return 0 };
        // A valid manifest's records are smaller than the largest, which can be addressed.
        self.parts(bank, expert).map(|(_, bytes)| bytes as usize).sum()
    }

    /// Reads a record and checks its header, and with `verify` its payload; returns the payload's
    /// stored checksum. `out` must have [`record_bytes`](Self::record_bytes).
    ///
    /// # Errors
    /// When there is no such expert, the record cannot be read, or it is not what it should be.
    pub fn read_record(
        &self,
        layer: u32,
        expert: u32,
        verify: bool,
        out: &mut [u8],
    ) -> Result<u64, FormatError> {
        let place = || format!("the record of layer {layer}, expert {expert}");
        let Some(&index) = self.bank_of_layer.get(&layer) else {
            return Err(self.no_record(place()));
        };
        let bank = &self.bank_list()[index];
        if expert >= bank.experts || out.len() != self.record_bytes(layer, expert) {
            return Err(self.no_record(place()));
        }
        let mut rest = &mut *out;
        let stripes = bank.stripes.iter().zip(&self.banks[index].stripes);
        for ((stripe, source), (position, bytes)) in stripes.zip(self.parts(index, expert)) {
            let (part, after) = rest.split_at_mut(bytes as usize);
            rest = after;
            source.read_exact_at(part, position).map_err(|stopped| {
                let file = self.file(stripe.directory, &stripe.file);
                stopped_error(file, place(), position, part.len(), stopped)
            })?;
        }
        self.check_record(layer, expert, verify, out)
    }

    /// Checks the header of a record that has been read, and with `verify` its payload; returns the
    /// payload's stored checksum.
    ///
    /// # Errors
    /// When there is no such expert, or the record is not what it should be.
    pub fn check_record(
        &self,
        layer: u32,
        expert: u32,
        verify: bool,
        record: &[u8],
    ) -> Result<u64, FormatError> {
        let place = || format!("the record of layer {layer}, expert {expert}");
        let bank = self.bank_of_layer.get(&layer).copied();
        let first = bank.and_then(|bank| Some((bank, self.parts(bank, expert).next()?.0)));
        let (Some((bank, position)), Some(layout)) = (first, &self.layout) else {
            return Err(self.no_record(place()));
        };
        layout.check(record, layer, expert, verify).map_err(|mismatch| {
            let stripe = &self.bank_list()[bank].stripes[0];
            FormatError::Container {
                file: self.file(stripe.directory, &stripe.file),
                what: format!("{} at byte {position}: {}", place(), mismatch.what),
                expected: mismatch.expected,
                found: mismatch.found,
            }
        })
    }

    /// Where the parts of a record lie in it, by its header, of which alone anything is read.
    ///
    /// # Errors
    /// When there is no such expert, the header cannot be read, or it is not what it should be.
    pub fn read_layout(&self, layer: u32, expert: u32) -> Result<RecordLayout, FormatError> {
        let place = || format!("the header of layer {layer}, expert {expert}");
        let found = self.bank_of_layer.get(&layer).zip(self.layout.as_ref());
        let Some((&index, layout)) = found else { return Err(self.no_record(place())) };
        let Some((position, _)) = self.parts(index, expert).next() else {
            return Err(self.no_record(place()));
        };
        let stripe = &self.bank_list()[index].stripes[0];
        let file = || self.file(stripe.directory, &stripe.file);
        let mut header = [0; HEADER_BYTES];
        let read = self.banks[index].stripes[0].read_exact_at(&mut header, position);
        read.map_err(|stopped| stopped_error(file(), place(), position, HEADER_BYTES, stopped))?;
        let wrong = |what: &str, expected, found| FormatError::Container {
            file: file(),
            what: format!("{} at byte {position}: {what}", place()),
            expected,
            found,
        };
        let own = layout.own(&header, layer, expert);
        let (own, _) = own.map_err(|e| wrong(&e.what, e.expected, e.found))?;
        let bytes = self.record_bytes(layer, expert);
        if own.record_bytes != bytes {
            let found = own.record_bytes.to_string();
            return Err(wrong("the size of the record", bytes.to_string(), found));
        }
        Ok(own)
    }

    /// Where the parts of a record that has been read and checked lie in it.
    ///
    /// # Errors
    /// As for [`check_record`](Self::check_record).
    pub fn record_layout(
        &self,
        layer: u32,
        expert: u32,
        record: &[u8],
    ) -> Result<RecordLayout, FormatError> {
        self.check_record(layer, expert, false, record)?;
        let own = self.layout.as_ref().and_then(|l| l.own(record, layer, expert).ok());
        Ok(own.expect("a checked record has a layout").0)
    }

    /// Of every stripe, the first byte and the number of bytes of a record's part; nothing when there
    /// is no such expert.
    fn parts(&self, bank: usize, expert: u32) -> impl Iterator<Item = (u64, u64)> {
        let starts = &self.banks[bank].starts;
        let bank = &self.bank_list()[bank];
        let e = expert as usize;
        let bytes = match &bank.records {
            _ if expert >= bank.experts => None,
            Some(records) => Some(records[e][1] * ALIGN as u64),
            None => Some(bank.stripes.iter().map(|stripe| stripe.bytes).sum()),
        };
        let parts = bytes.into_iter().flat_map(|bytes| bank.divide(bytes)).enumerate();
        parts.map(move |(stripe, bytes)| {
            let start = starts.get(e * bank.stripes.len() + stripe).copied();
            (start.unwrap_or(u64::from(expert) * bytes), bytes)
        })
    }

    /// The files of the trunk and of the experts, to which extents refer.
    pub fn data_files(&self) -> Vec<DataFile> {
        let file = |directory: usize, file: &str, bytes| {
            let folder = Folder::Disk(self.folder.join(&self.manifest.directories[directory]));
            DataFile::new(&folder, file, bytes)
        };
        let trunk = &self.manifest.trunk;
        let mut files = vec![file(trunk.directory, &trunk.file, trunk.bytes)];
        for bank in self.bank_list() {
            let stripes = bank.stripes.iter().zip(bank.file_bytes());
            files.extend(stripes.map(|(s, bytes)| file(s.directory, &s.file, bytes)));
        }
        files
    }

    /// Where the parts of a record lie, in order; nothing when there is no such expert.
    pub fn record_extents(&self, layer: u32, expert: u32) -> Vec<DataExtent> {
        let Some(&index) = self.bank_of_layer.get(&layer) else { return Vec::new() };
        let first =
            1 + self.bank_list()[..index].iter().map(|bank| bank.stripes.len()).sum::<usize>();
        let parts = self.parts(index, expert).zip(first..);
        // A small record may have nothing in some stripe.
        let parts = parts.filter(|((_, bytes), _)| *bytes > 0);
        parts.map(|((offset, bytes), file)| DataExtent { file, offset, bytes }).collect()
    }

    /// Where the codes and the scales of a tensor of the trunk lie.
    pub fn tensor_extents(&self, name: &str) -> Option<[DataExtent; 2]> {
        let &(run, tensor) = self.tensors.get(name)?;
        let run = &self.manifest.trunk.runs[run];
        let tensor = &run.tensors[tensor];
        let extent = |at, bytes| DataExtent { file: 0, offset: run.offset + at, bytes };
        Some([
            extent(tensor.offset, tensor.code_bytes),
            extent(tensor.scale_offset(), tensor.scale_bytes),
        ])
    }

    /// Checks a run of the trunk that has been read.
    ///
    /// # Errors
    /// When its checksum is another.
    pub fn check_run(&self, run: &Run, bytes: &[u8]) -> Result<(), FormatError> {
        let what = format!("the checksum of run {:?} at byte {}", run.name, run.offset);
        check_sum(&self.trunk_file(), &what, &run.checksum, checksum(bytes))
    }

    /// Checks one run of the trunk, byte by byte.
    ///
    /// # Errors
    /// When it cannot be read or its checksum is another.
    pub fn verify_run(&self, run: &Run) -> Result<(), FormatError> {
        self.verify_run_parts(run, &[]).map(|_| ())
    }

    /// The same, and the checksums of parts of it: positions in the run. They are of the very bytes
    /// that were checked, so that a part that is read alone later can be checked too.
    ///
    /// # Errors
    /// As for [`verify_run`](Self::verify_run).
    pub fn verify_run_parts(
        &self,
        run: &Run,
        parts: &[Range<u64>],
    ) -> Result<Vec<u64>, FormatError> {
        let mut sum = Checksum::default();
        let mut sums = vec![Checksum::default(); parts.len()];
        let mut buffer = vec![0; VERIFY_BYTES];
        let mut at = 0;
        while at < run.bytes {
            let piece = &mut buffer[..VERIFY_BYTES.min((run.bytes - at) as usize)];
            self.read_trunk(run.offset + at, piece, &run.name)?;
            sum.update(piece);
            for (part, sum) in parts.iter().zip(&mut sums) {
                let within = |byte: u64| byte.clamp(at, at + piece.len() as u64) - at;
                sum.update(&piece[within(part.start) as usize..within(part.end) as usize]);
            }
            at += piece.len() as u64;
        }
        let what = format!("the checksum of run {:?} at byte {}", run.name, run.offset);
        check_sum(&self.trunk_file(), &what, &run.checksum, sum.finish())?;
        Ok(sums.iter().map(Checksum::finish).collect())
    }

    /// All banks, by ascending layer.
    pub fn bank_list(&self) -> &[Bank] {
        self.manifest.experts.as_ref().map_or(&[], |experts| &experts.banks)
    }

    fn locate(&self, name: &str) -> Result<(&Run, &TrunkTensor), FormatError> {
        match self.tensors.get(name) {
            Some(&(r, t)) => {
                let run = &self.manifest.trunk.runs[r];
                Ok((run, &run.tensors[t]))
            }
            None => Err(FormatError::MissingTensor {
                tensor: name.to_owned(),
                folder: self.folder.display().to_string(),
                tensors: self.tensors.len(),
            }),
        }
    }

    fn buffer(&self, name: &str, bytes: u64) -> Result<Vec<u8>, FormatError> {
        let mut out = Vec::new();
        let n = usize::try_from(bytes).unwrap_or(usize::MAX);
        out.try_reserve_exact(n).map_err(|_| FormatError::OutOfMemory {
            shard: self.trunk_file(),
            tensor: name.to_owned(),
            bytes,
        })?;
        out.resize(n, 0);
        Ok(out)
    }

    fn read_trunk(&self, position: u64, out: &mut [u8], what: &str) -> Result<(), FormatError> {
        let bytes = out.len();
        self.trunk.read_exact_at(out, position).map_err(|stopped| {
            stopped_error(self.trunk_file(), format!("{what:?}"), position, bytes, stopped)
        })
    }

    fn trunk_file(&self) -> String {
        self.file(self.manifest.trunk.directory, &self.manifest.trunk.file)
    }

    fn file(&self, directory: usize, file: &str) -> String {
        self.folder.join(&self.manifest.directories[directory]).join(file).display().to_string()
    }

    fn no_record(&self, what: String) -> FormatError {
        FormatError::Container {
            file: self.folder.join(MANIFEST).display().to_string(),
            what,
            expected: "one that the container has, into a buffer of its size".to_owned(),
            found: "none".to_owned(),
        }
    }
}

/// Where the records of a bank begin in its stripes, which they lie in in the order of their places.
fn record_starts(bank: &Bank) -> Vec<u64> {
    let Some(records) = &bank.records else { return Vec::new() };
    let mut order: Vec<usize> = (0..records.len()).collect();
    order.sort_by_key(|&expert| records[expert][0]);
    let n = bank.stripes.len();
    let (mut starts, mut ends) = (vec![0; records.len() * n], vec![0; n]);
    for expert in order {
        starts[expert * n..][..n].copy_from_slice(&ends);
        for (end, bytes) in ends.iter_mut().zip(bank.divide(records[expert][1] * ALIGN as u64)) {
            *end += bytes;
        }
    }
    starts
}

fn check_sum(file: &str, what: &str, expected: &str, found: u64) -> Result<(), FormatError> {
    let found = hex(found);
    if found == expected {
        return Ok(());
    }
    Err(FormatError::Container {
        file: file.to_owned(),
        what: what.to_owned(),
        expected: expected.to_owned(),
        found,
    })
}

fn stopped_error(
    file: String,
    what: String,
    position: u64,
    bytes: usize,
    stopped: crate::read_at::Stopped,
) -> FormatError {
    FormatError::Container {
        file,
        what: format!("reading {what} at byte {position}"),
        expected: format!("{bytes} bytes"),
        found: match stopped.error {
            None => format!("the end of the file after {} bytes", stopped.filled),
            Some(error) => format!("{error} after {} bytes", stopped.filled),
        },
    }
}
