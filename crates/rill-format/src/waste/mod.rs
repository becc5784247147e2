//! `.waste` containers of version 0: a directory with a manifest, the trunk, one bank of packed
//! experts per layer, and the codebooks they are packed with.
//!
//! Opening reads the manifest and the codebooks and takes the size of everything else. Records
//! say who they are and are checked each time they are read.

mod codebooks;
mod manifest;
mod record;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::json;

use crate::read_at::{Source, Stopped};
use crate::{DataExtent, DataFile, Folder, FormatError};
use codebooks::Codebooks;
pub use manifest::{
    WasteExperts, WasteFormat, WasteLayer, WasteManifest, WasteTensor, parse_waste_manifest,
};
pub use record::{ExpertDims, WasteExpert, WasteMatrix};
use record::{RecordLayout, stored_crc};

/// An open container. Immutable and shared between threads; its files stay open, so replacing
/// them on disk does not mix two versions.
#[derive(Debug)]
pub struct Waste {
    folder: Folder,
    manifest: WasteManifest,
    /// Numbers of the trunk's tensors by name.
    names: HashMap<String, usize>,
    trunk: Source,
    /// By layer, the same layers as in the manifest.
    banks: BTreeMap<u32, Source>,
    codebooks: Codebooks,
    trunk_bytes: u64,
    payload_bytes: u64,
}

/// Bytes of a tensor or of some of its rows, without the padding that the file has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WasteData {
    /// Codes, row by row.
    pub codes: Vec<u8>,
    /// Little-endian f16 scales, row by row; none for `F32`.
    pub scales: Vec<u8>,
}

impl Waste {
    /// Whether a folder is such a container, of any version: it has a `manifest.json` with a
    /// `format_version`, and it is not Rill's own.
    pub fn is_waste(folder: &Path) -> bool {
        let folder = Folder::Disk(folder.to_owned());
        folder.read(MANIFEST, MAX_JSON_BYTES).is_ok_and(|json| manifest::is_manifest(&json))
    }

    /// Opens a container.
    ///
    /// # Errors
    ///
    /// If the version is not 0, if a file is missing or is not as long as the manifest says, if
    /// the manifest contradicts itself, or if codebooks are missing or broken.
    pub fn open(folder: PathBuf) -> Result<Self, FormatError> {
        let folder = Folder::Disk(folder);
        let json = folder.read(MANIFEST, MAX_JSON_BYTES)?;
        let (trunk, trunk_bytes) = open(&folder, TRUNK)?;
        let manifest = parse_waste_manifest(&folder.describe(MANIFEST), &json, trunk_bytes)?;

        let mut payload_bytes = trunk_bytes;
        let mut banks = BTreeMap::new();
        for (&number, layer) in &manifest.layers {
            let (bank, found) = open(&folder, &layer.file)?;
            let expected = layer.record_bytes * u64::from(layer.experts);
            if found != expected {
                let file = folder.describe(&layer.file);
                return Err(FormatError::WasteFileSize { file, expected, found });
            }
            payload_bytes = payload_bytes.saturating_add(found);
            banks.insert(number, bank);
        }

        let file = folder.describe(CODEBOOKS);
        let bytes = folder.read(CODEBOOKS, MAX_CODEBOOK_BYTES)?;
        payload_bytes = payload_bytes.saturating_add(bytes.len() as u64);
        let codebooks = Codebooks::parse(&file, &bytes, manifest.experts.entries)?;
        for (&layer, WasteLayer { codebook_base, .. }) in &manifest.layers {
            for i in 0..3 * manifest.experts.stages as u16 {
                let number = codebook_base + i;
                if codebooks.get(number).is_none() {
                    let number = u32::from(number);
                    return Err(FormatError::MissingCodebook { file, number, layer });
                }
            }
        }

        let names = manifest.tensors.iter().zip(0..).map(|(t, i)| (t.name.clone(), i)).collect();
        Ok(Self { folder, manifest, names, trunk, banks, codebooks, trunk_bytes, payload_bytes })
    }

    /// `config.json` as the model's release has it: the text configuration alone, or inside the
    /// multimodal one as `text_config`.
    pub fn config_json(&self) -> Vec<u8> {
        self.manifest.config_json.clone()
    }

    /// The vocabulary, in the form of `tiktoken.model`.
    ///
    /// # Errors
    ///
    /// If the file is missing, unreasonably large or cannot be read.
    pub fn tokenizer_model(&self) -> Result<Vec<u8>, FormatError> {
        self.folder.read(TOKENIZER, MAX_TOKENIZER_BYTES)
    }

    /// The special tokens, in the form of `tokenizer_config.json`.
    ///
    /// # Errors
    ///
    /// If the file is missing, unreasonably large, cannot be read, or is not a list of ids and
    /// texts without repeated ids.
    pub fn tokenizer_config_json(&self) -> Result<Vec<u8>, FormatError> {
        #[derive(Deserialize)]
        struct Special {
            id: u32,
            text: String,
        }

        let bytes = self.folder.read(SPECIALS, MAX_JSON_BYTES)?;
        let invalid =
            |reason| FormatError::BadSpecials { file: self.folder.describe(SPECIALS), reason };
        let specials: Vec<Special> =
            serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
        let mut decoder = serde_json::Map::new();
        for Special { id, text } in specials {
            let token = json!({ "content": text, "special": true });
            if decoder.insert(id.to_string(), token).is_some() {
                return Err(invalid(format!("id {id} is there twice")));
            }
        }
        Ok(json!({ "added_tokens_decoder": decoder }).to_string().into_bytes())
    }

    /// Where the files are.
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// The tensors of the trunk in file order, so that reading them reads forward.
    pub fn trunk(&self) -> impl Iterator<Item = &WasteTensor> {
        self.manifest.tensors.iter()
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<&WasteTensor> {
        self.names.get(name).map(|&i| &self.manifest.tensors[i])
    }

    /// Reads a tensor of this container. `F32`: 4 bytes a value, no scales. `Q8`: a signed byte a
    /// value. `Q4`: rows of two values plus 8 to a byte, the first lowest. `Q3` is read as `Q8`,
    /// which is exact. The scales are f16, one for each group of a row's inputs.
    ///
    /// # Errors
    ///
    /// If the file shrank since it was opened, if the disk fails, or if there is no memory.
    pub fn read_trunk(&self, tensor: &WasteTensor) -> Result<WasteData, FormatError> {
        self.read_trunk_rows(tensor, 0, tensor.rows)
    }

    /// Reads `n` rows from row `first` of a tensor, as [`read_trunk`](Self::read_trunk) does. A
    /// row is what the first dimension counts.
    ///
    /// # Errors
    ///
    /// If the tensor lacks such rows, and as for `read_trunk`.
    pub fn read_trunk_rows(
        &self,
        tensor: &WasteTensor,
        first: u64,
        n: u64,
    ) -> Result<WasteData, FormatError> {
        if first.checked_add(n).is_none_or(|end| end > tensor.rows) {
            return Err(FormatError::BadRows {
                file: self.folder.describe(TRUNK),
                tensor: tensor.name.clone(),
                first,
                n,
                rows: tensor.rows,
            });
        }
        let codes = self.read_codes(tensor, first, n)?;
        let scale_row_bytes = tensor.scale_row_bytes();
        let mut scales = self.zeroed(TRUNK, &tensor.name, n * scale_row_bytes)?;
        self.read_trunk_at(tensor, tensor.scales_at + first * scale_row_bytes, &mut scales)?;
        Ok(WasteData { codes, scales })
    }

    /// The number format of all experts.
    pub fn expert_format(&self) -> WasteExperts {
        self.manifest.experts
    }

    /// The layers that have experts, by number.
    pub fn layers(&self) -> &BTreeMap<u32, WasteLayer> {
        &self.manifest.layers
    }

    /// Reads one expert's record and says where its matrices are. `buffer` is resized to the
    /// record; after an error its contents mean nothing. `verify` compares the checksum too.
    /// Indices and scales are not looked at: an index may be beyond a codebook of fewer than 256
    /// entries, a scale may be infinite or NaN.
    ///
    /// # Errors
    ///
    /// If there is no such expert, if its records cannot hold matrices of these dimensions, if
    /// the file shrank or the disk fails, or if the record is another one or damaged.
    pub fn read_expert(
        &self,
        layer: u32,
        expert: u32,
        dims: ExpertDims,
        verify: bool,
        buffer: &mut Vec<u8>,
    ) -> Result<WasteExpert, FormatError> {
        let (bank, layout) = self.record_layout(layer, expert, dims)?;
        let what = || format!("expert {expert} of layer {layer}");
        let start = u64::from(expert) * bank.record_bytes;
        let Ok(record_bytes) = usize::try_from(bank.record_bytes) else {
            return Err(self.out_of_memory(&bank.file, &what(), bank.record_bytes));
        };
        if buffer.try_reserve_exact(record_bytes.saturating_sub(buffer.len())).is_err() {
            return Err(self.out_of_memory(&bank.file, &what(), bank.record_bytes));
        }
        buffer.resize(record_bytes, 0);
        self.banks[&layer]
            .read_exact_at(buffer, start)
            .map_err(|stopped| self.stopped(&bank.file, &what(), start, buffer.len(), stopped))?;
        self.check_record((layer, expert), bank, &layout, verify, buffer)
    }

    /// Checks an expert's record that has been read, as [`read_expert`](Self::read_expert) does, and
    /// says where its matrices are.
    ///
    /// # Errors
    ///
    /// If there is no such expert, or if the record is another one or damaged.
    pub fn check_expert(
        &self,
        layer: u32,
        expert: u32,
        dims: ExpertDims,
        verify: bool,
        record: &[u8],
    ) -> Result<WasteExpert, FormatError> {
        let (bank, layout) = self.record_layout(layer, expert, dims)?;
        if record.len() as u64 != bank.record_bytes {
            let shard = self.folder.describe(&bank.file);
            let tensor = format!("expert {expert} of layer {layer}");
            let (expected, found) = (bank.record_bytes, record.len() as u64);
            let byte = u64::from(expert) * bank.record_bytes + found;
            return Err(FormatError::ShortRead { shard, tensor, byte, expected, found });
        }
        self.check_record((layer, expert), bank, &layout, verify, record)
    }

    /// Where an expert's matrices lie within its record, for a record that has been checked.
    ///
    /// # Errors
    ///
    /// If there is no such expert, or if its records cannot hold matrices of these dimensions.
    pub fn expert_places(
        &self,
        layer: u32,
        expert: u32,
        dims: ExpertDims,
    ) -> Result<WasteExpert, FormatError> {
        let (bank, layout) = self.record_layout(layer, expert, dims)?;
        Ok(layout.expert(bank.codebook_base, self.manifest.experts.stages))
    }

    /// The bank an expert is in, and the layout of its record.
    fn record_layout(
        &self,
        layer: u32,
        expert: u32,
        dims: ExpertDims,
    ) -> Result<(&WasteLayer, RecordLayout), FormatError> {
        let bank = self.manifest.layers.get(&layer).filter(|bank| expert < bank.experts);
        let Some(bank) = bank else {
            let folder = self.folder.describe_folder();
            return Err(FormatError::MissingExpert { folder, layer, expert });
        };
        let layout = RecordLayout::new(dims, self.manifest.experts);
        let expected = layout.as_ref().map(RecordLayout::record_bytes);
        match layout.filter(|_| expected == Some(bank.record_bytes)) {
            Some(layout) => Ok((bank, layout)),
            None => {
                let file = self.folder.describe(&bank.file);
                let ExpertDims { inter, width } = dims;
                let found = bank.record_bytes;
                Err(FormatError::RecordShape { file, layer, inter, width, expected, found })
            }
        }
    }

    fn check_record(
        &self,
        (layer, expert): (u32, u32),
        bank: &WasteLayer,
        layout: &RecordLayout,
        verify: bool,
        record: &[u8],
    ) -> Result<WasteExpert, FormatError> {
        let file = || self.folder.describe(&bank.file);
        let experts = self.manifest.experts;
        let start = u64::from(expert) * bank.record_bytes;
        if let Some((field, byte, expected, found)) =
            layout.wrong_field(record, layer, expert, bank.codebook_base, experts)
        {
            let byte = start + byte as u64;
            return Err(FormatError::BadRecord {
                file: file(),
                layer,
                expert,
                byte,
                field,
                expected,
                found,
            });
        }
        if verify {
            let expected = stored_crc(record);
            let found = crc32fast::hash(&record[layout.checked()]);
            if found != expected {
                return Err(FormatError::RecordChecksum {
                    file: file(),
                    layer,
                    expert,
                    byte: start,
                    expected,
                    found,
                });
            }
        }
        Ok(layout.expert(bank.codebook_base, experts.stages))
    }

    /// The files of the trunk and of the experts, to which extents refer.
    pub fn data_files(&self) -> Vec<DataFile> {
        let mut files = vec![DataFile::new(&self.folder, TRUNK, self.trunk_bytes)];
        for bank in self.manifest.layers.values() {
            let bytes = bank.record_bytes * u64::from(bank.experts);
            files.push(DataFile::new(&self.folder, &bank.file, bytes));
        }
        files
    }

    /// Where an expert's record lies; `None` when there is no such expert.
    pub fn record_extent(&self, layer: u32, expert: u32) -> Option<DataExtent> {
        let bank = self.manifest.layers.get(&layer).filter(|bank| expert < bank.experts)?;
        let file = 1 + self.manifest.layers.range(..layer).count();
        let offset = u64::from(expert) * bank.record_bytes;
        Some(DataExtent { file, offset, bytes: bank.record_bytes })
    }

    /// Where the codes and the scales of a tensor of the trunk lie, if they lie there as
    /// [`read_trunk`](Self::read_trunk) delivers them, without padding between rows.
    pub fn tensor_extents(&self, tensor: &WasteTensor) -> Option<[DataExtent; 2]> {
        let row = tensor.row_bytes();
        if tensor.format == WasteFormat::Q3 || tensor.stored_row_bytes() != row {
            return None;
        }
        let extent = |offset, bytes| DataExtent { file: 0, offset, bytes };
        Some([
            extent(tensor.place().start, tensor.rows * row),
            extent(tensor.scales_at, tensor.rows * tensor.scale_row_bytes()),
        ])
    }

    /// Values of a codebook, (entries, 8), all finite.
    pub fn codebook(&self, number: u16) -> Option<&[f32]> {
        self.codebooks.get(number)
    }

    /// Bytes of each record of a layer.
    pub fn record_bytes(&self, layer: u32) -> Option<u64> {
        self.manifest.layers.get(&layer).map(|layer| layer.record_bytes)
    }

    /// Bytes of the trunk, the banks and the codebooks together.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    fn read_codes(&self, tensor: &WasteTensor, first: u64, n: u64) -> Result<Vec<u8>, FormatError> {
        let stored = tensor.stored_row_bytes();
        let kept = tensor.row_bytes();
        let mut position = tensor.place().start + first * stored;
        let mut codes = self.zeroed(TRUNK, &tensor.name, n * kept)?;
        if stored == kept && tensor.format != WasteFormat::Q3 {
            self.read_trunk_at(tensor, position, &mut codes)?;
            return Ok(codes);
        }

        let rows_at_once = (PIECE_BYTES / stored).clamp(1, n.max(1));
        let mut piece = self.zeroed(TRUNK, &tensor.name, rows_at_once * stored)?;
        // Both fit: they are no longer than vectors that exist.
        let (stored, kept) = (stored as usize, kept as usize);
        for rows in codes.chunks_mut(rows_at_once as usize * kept) {
            let piece = &mut piece[..rows.len() / kept * stored];
            self.read_trunk_at(tensor, position, piece)?;
            position += piece.len() as u64;
            for (out, row) in rows.chunks_exact_mut(kept).zip(piece.chunks_exact(stored)) {
                match tensor.format {
                    WasteFormat::Q3 => unpack_q3(row, out),
                    _ => out.copy_from_slice(&row[..kept]),
                }
            }
        }
        Ok(codes)
    }

    fn read_trunk_at(
        &self,
        tensor: &WasteTensor,
        position: u64,
        out: &mut [u8],
    ) -> Result<(), FormatError> {
        self.trunk
            .read_exact_at(out, position)
            .map_err(|stopped| self.stopped(TRUNK, &tensor.name, position, out.len(), stopped))
    }

    /// `what` is the tensor or the record that was being read.
    fn stopped(
        &self,
        file: &str,
        what: &str,
        position: u64,
        expected: usize,
        stopped: Stopped,
    ) -> FormatError {
        let shard = self.folder.describe(file);
        let tensor = what.to_owned();
        let found = stopped.filled as u64;
        let byte = position + found;
        match stopped.error {
            Some(source) => FormatError::ReadFailed { shard, tensor, byte, source },
            None => {
                FormatError::ShortRead { shard, tensor, byte, expected: expected as u64, found }
            }
        }
    }

    fn zeroed(&self, file: &str, what: &str, bytes: u64) -> Result<Vec<u8>, FormatError> {
        let mut out = Vec::new();
        let n = usize::try_from(bytes).unwrap_or(usize::MAX);
        if out.try_reserve_exact(n).is_err() {
            return Err(self.out_of_memory(file, what, bytes));
        }
        out.resize(n, 0);
        Ok(out)
    }

    fn out_of_memory(&self, file: &str, what: &str, bytes: u64) -> FormatError {
        let shard = self.folder.describe(file);
        FormatError::OutOfMemory { shard, tensor: what.to_owned(), bytes }
    }
}

const MANIFEST: &str = "manifest.json";
const TRUNK: &str = "trunk.bin";
const CODEBOOKS: &str = "codebooks.bin";
const TOKENIZER: &str = "tokenizer.model";
const SPECIALS: &str = "specials.json";

/// Room for ten times K3's tensors.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// K3's vocabulary has about 3 MB.
const MAX_TOKENIZER_BYTES: u64 = 64 << 20;

/// K3's have 3.4 MB.
const MAX_CODEBOOK_BYTES: u64 = 64 << 20;

/// How much of a tensor is read at once when its rows have to be repacked.
const PIECE_BYTES: u64 = 1 << 20;

/// A file and its size.
fn open(folder: &Folder, file: &str) -> Result<(Source, u64), FormatError> {
    let source = folder.open(file)?;
    let bytes = source.len().map_err(|error| folder.io_error(file, "taking its size", error))?;
    Ok((source, bytes))
}

/// A row of three-bit codes plus 4, lowest bits first, as signed bytes. The byte that ends a
/// stored row lets the last code be read like the others.
fn unpack_q3(row: &[u8], out: &mut [u8]) {
    for (i, out) in out.iter_mut().enumerate() {
        let (byte, shift) = (3 * i / 8, 3 * i % 8);
        let pair = u16::from_le_bytes([row[byte], row[byte + 1]]);
        *out = (pair >> shift & 7).wrapping_sub(4) as u8;
    }
}
