//! `.waste` containers of version 0 as a source. Packed matrices of the trunk are taken as they are,
//! three-bit ones as q8 with the same codes. Experts are decoded, because a `.rill` container has no
//! format with codebooks.

use rill_format::container::{self, CodecName};
use rill_format::{
    Dtype, ExpertDims, Folder, FormatError, Waste, WasteFormat, WasteMatrix, WasteTensor,
};
use rill_kernels::{Codec, LayoutError, Matrix, Vq};

use crate::config::{MAX_NUMBER, number, parse, text};
use crate::error::ConvertError;
use crate::source::{ConvertSource, Form, SourceExperts, SourceMatrix, SourceTensor, StoredBytes};

const TRUNK: &str = "trunk.bin";
const CODEBOOKS: &str = "codebooks.bin";

impl ConvertSource for Waste {
    fn folder(&self) -> Folder {
        Waste::folder(self).clone()
    }

    fn small_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>, FormatError> {
        let folder = Waste::folder(self);
        match name {
            "config.json" => Ok(Some(self.config_json())),
            "tiktoken.model" => self.tokenizer_model().map(Some),
            "tokenizer_config.json" => self.tokenizer_config_json().map(Some),
            name if folder.exists(name) => folder.read(name, max_bytes).map(Some),
            _ => Ok(None),
        }
    }

    fn identity(&self) -> String {
        let mut digest = container::Checksum::default();
        self.trunk().for_each(|tensor| digest.update(format!("{tensor:?}\n").as_bytes()));
        digest.update(format!("{:?} {:?}", self.expert_format(), self.layers()).as_bytes());
        container::hex(digest.finish())
    }

    fn check(&self) -> Result<(), FormatError> {
        // Records are checked when they are read; the trunk has no checksums.
        Ok(())
    }

    fn files(&self) -> Vec<String> {
        let mut files: Vec<String> = self.layers().values().map(|bank| bank.file.clone()).collect();
        files.extend([TRUNK, CODEBOOKS].map(str::to_owned));
        files.sort();
        files
    }

    fn trunk(&self) -> Vec<SourceTensor> {
        let tensor = |tensor: &WasteTensor| SourceTensor {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            form: match codec(tensor) {
                Some(codec) if tensor.shape.len() == 2 => Form::Packed(codec),
                // Grouped by rows that a `.rill` container does not see.
                _ => Form::Plain(Dtype::F32),
            },
            file: TRUNK.to_owned(),
        };
        Waste::trunk(self).map(tensor).collect()
    }

    fn read_rows(
        &self,
        tensor: &SourceTensor,
        first: u64,
        n: u64,
    ) -> Result<StoredBytes, FormatError> {
        let stored = self.find(&tensor.name).ok_or_else(|| FormatError::MissingTensor {
            tensor: tensor.name.clone(),
            folder: Waste::folder(self).describe(""),
            tensors: Waste::trunk(self).count(),
        })?;
        let data = match stored.shape.len() {
            2 => self.read_trunk_rows(stored, first, n)?,
            // One row to us.
            _ => self.read_trunk(stored)?,
        };
        match codec(stored) {
            Some(codec) if stored.shape.len() != 2 => {
                let rows = stored.shape.first().copied().unwrap_or(1) as usize;
                let cols = stored.shape.iter().skip(1).product::<u64>() as usize;
                let weights = Form::Packed(codec).decode(rows, cols, &data.codes, &data.scales);
                let weights = weights.map_err(|error| misfit(self, TRUNK, &tensor.name, error))?;
                Ok((bytes_of(&weights), Vec::new()))
            }
            _ => Ok((data.codes, data.scales)),
        }
    }

    fn experts(&self) -> Result<Option<SourceExperts>, ConvertError> {
        if self.layers().is_empty() {
            return Ok(None);
        }
        let config = parse(&self.config_json())?;
        let config = text(&config);
        let inter = number(config, "moe_intermediate_size", MAX_NUMBER)?;
        let width = match config["routed_expert_hidden_size"].is_null() {
            true => number(config, "hidden_size", MAX_NUMBER)?,
            false => number(config, "routed_expert_hidden_size", MAX_NUMBER)?,
        };
        let form = Form::Vq(vq(self));
        let matrices = [(inter, width), (inter, width), (width, inter)]
            .map(|(rows, cols)| SourceMatrix { rows, cols, form });
        let banks = self.layers().iter().map(|(&layer, bank)| (layer, bank.experts)).collect();
        Ok(Some(SourceExperts::new(matrices, banks)))
    }

    fn expert_files(&self, experts: &SourceExperts, bank: usize, _: u32) -> Vec<&str> {
        let bank = self.layers().get(&experts.banks[bank].0);
        bank.map(|bank| bank.file.as_str()).into_iter().chain([CODEBOOKS]).collect()
    }

    fn read_expert(
        &self,
        experts: &SourceExperts,
        bank: usize,
        expert: u32,
    ) -> Result<[StoredBytes; 3], FormatError> {
        let layer = experts.banks[bank].0;
        let [gate, ..] = experts.matrices;
        let dims = ExpertDims { inter: gate.rows as usize, width: gate.cols as usize };
        let mut record = Vec::new();
        let place = Waste::read_expert(self, layer, expert, dims, true, &mut record)?;
        let mut parts = <[StoredBytes; 3]>::default();
        for (index, place) in [&place.gate, &place.up, &place.down].into_iter().enumerate() {
            let SourceMatrix { rows, cols, .. } = experts.matrices[index];
            let weights = decode(self, &record, place, (rows as usize, cols as usize));
            let file = self.layers().get(&layer).map_or("", |bank| &bank.file);
            let name = experts.name(bank, expert, index);
            parts[index].0 = weights.map_err(|error| misfit(self, file, &name, error))?;
        }
        Ok(parts)
    }
}

fn vq(waste: &Waste) -> Vq {
    let format = waste.expert_format();
    let (stages, entries) = (format.stages, format.entries);
    Vq { stages, entries, index_block: format.index_block, packed: format.packed }
}

/// One matrix of a record as bytes of f32.
fn decode(
    waste: &Waste,
    record: &[u8],
    place: &WasteMatrix,
    (rows, cols): (usize, usize),
) -> Result<Vec<u8>, LayoutError> {
    let vq = vq(waste);
    let mut tables = Vec::new();
    for stage in 0..vq.stages as u16 {
        // Opening has checked that all are there.
        let book = waste.codebook(place.first_codebook.saturating_add(stage));
        tables.extend_from_slice(book.unwrap_or_default());
    }
    let (codes, scales) = (&record[place.codes.clone()], &record[place.scales.clone()]);
    let matrix = Matrix::with_tables(Codec::Vq(vq), rows, cols, codes, scales, &tables)?;
    let mut weights = vec![0; 4 * rows * cols];
    let mut row = vec![0.0; cols];
    for (r, out) in weights.chunks_exact_mut(4 * cols.max(1)).enumerate() {
        matrix.decode_row(r, &mut row);
        out.copy_from_slice(&bytes_of(&row));
    }
    Ok(weights)
}

/// Bytes that are no matrix.
fn misfit(waste: &Waste, file: &str, tensor: &str, error: LayoutError) -> FormatError {
    FormatError::Container {
        file: Waste::folder(waste).describe(file),
        what: tensor.to_owned(),
        expected: "codes and scales of its format".to_owned(),
        found: error.to_string(),
    }
}

/// How a tensor of the trunk would be stored in a `.rill` container; `None` for plain numbers.
fn codec(tensor: &WasteTensor) -> Option<container::Codec> {
    let name = match tensor.format {
        WasteFormat::F32 => return None,
        WasteFormat::Q8 | WasteFormat::Q3 => CodecName::Q8,
        WasteFormat::Q4 => CodecName::Q4,
    };
    Some(container::Codec::grouped(name, tensor.group))
}

fn bytes_of(weights: &[f32]) -> Vec<u8> {
    weights.iter().flat_map(|w| w.to_le_bytes()).collect()
}
