//! The `.waste` container, version 0, as far as it is written: trunk and experts of random
//! weights under the names and in the places that its readers expect.

use rill_kernels::{Codec, Vq};
use serde_json::{Value, json};

use super::direct::PAGE_BYTES;
use super::noise::{Noise, codebooks, key};
use super::shapes::Shapes;
use super::{Content, Part, Region, expert_noise, matrix_shapes, rows_and_cols};
use crate::error::ConvertError;
use crate::place::GROUP;

/// What experts are stored as: `VQ3R`, three indices of eight bits for eight weights.
pub(super) const VQ: Vq = Vq { stages: 3, entries: 256, index_block: 64, packed: false };
/// Its number in headers.
const FMT: u8 = 4;
/// Codebooks of a layer: three matrices of an expert, each with its stages.
const BOOKS: u16 = 3 * VQ.stages as u16;
const HEADER_BYTES: usize = 48;
/// Elements from which on a matrix is packed.
const PACKED_ELEMENTS: u64 = 65_536;

/// Where the parts of an expert's record lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// Rows and columns of gate, up, down.
    shapes: [(u64, u64); 3],
    /// First bytes of gate, up, down and the scales.
    starts: [usize; 4],
    end: usize,
    pub(super) bytes: usize,
}

impl Record {
    pub(super) fn new(shapes: &Shapes) -> Result<Self, ConvertError> {
        let shapes = matrix_shapes(&shapes.experts);
        let mut starts = [0; 4];
        let (mut at, mut rows_in_all) = (HEADER_BYTES, 0);
        for (start, (rows, cols)) in starts.iter_mut().zip(shapes) {
            let layout = Codec::Vq(VQ).layout(rows as usize, cols as usize);
            let layout = layout.map_err(|source| ConvertError::Layout {
                tensor: "the experts".to_owned(),
                source,
            })?;
            *start = at;
            at = at.saturating_add(layout.codes);
            rows_in_all += rows as usize;
        }
        starts[3] = at;
        let end = at.saturating_add(2 * rows_in_all);
        if end > (u32::MAX as usize) - PAGE_BYTES {
            return Err(ConvertError::Config {
                field: "moe_intermediate_size".to_owned(),
                expected: "experts of less than 4 GiB, which .waste can address".to_owned(),
                found: format!("{end} bytes"),
            });
        }
        Ok(Self { shapes, starts, end, bytes: end.next_multiple_of(PAGE_BYTES) })
    }

    /// Fills in a record of which all that this does not write is zero.
    pub(super) fn fill(&self, seed: u64, layer: u32, bank: usize, expert: u32, out: &mut [u8]) {
        let mut scales_at = self.starts[3];
        for (matrix, (rows, cols)) in self.shapes.into_iter().enumerate() {
            let noise = expert_noise(seed, Codec::Vq(VQ), (layer, expert, matrix), (rows, cols));
            noise.codes(0, &mut out[self.starts[matrix]..self.starts[matrix + 1]]);
            let scale_bytes = 2 * rows as usize;
            noise.scales(0, &mut out[scales_at..scales_at + scale_bytes]);
            scales_at += scale_bytes;
        }
        let crc = crc32fast::hash(&out[HEADER_BYTES..self.end]);
        // Fewer than 2^16 layers, experts and codebooks: the configuration's limits.
        let (layer, expert) = (layer as u16, expert as u16);
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend(b"WEXP");
        header.extend(layer.to_le_bytes());
        header.extend(expert.to_le_bytes());
        header.extend([FMT, 0]);
        header.extend((bank as u16 * BOOKS).to_le_bytes());
        header.extend([0; 4]);
        header.extend(((self.bytes / PAGE_BYTES) as u32).to_le_bytes());
        header.extend(self.starts.iter().flat_map(|&start| (start as u32).to_le_bytes()));
        header.extend(crc.to_le_bytes());
        header.resize(HEADER_BYTES, 0);
        out[..HEADER_BYTES].copy_from_slice(&header);
    }
}

/// How the trunk's tensors are stored, and the list of them for the manifest.
pub(super) fn trunk(
    tensors: &[(String, Vec<u64>, Noise)],
) -> Result<(Vec<Region>, Value), ConvertError> {
    let mut regions = Vec::new();
    let mut list = Vec::new();
    let mut at = 0u64;
    for (name, shape, noise) in tensors {
        let (rows, cols) = rows_and_cols(shape);
        let fmt = match noise.codec {
            Codec::Q8 { .. } => 2,
            Codec::Q4 { .. } => 3,
            _ => 0,
        };
        // The format pads rows to whole groups and keeps small tensors plain.
        let packed =
            fmt != 0 && cols.is_multiple_of(GROUP.into()) && rows * cols >= PACKED_ELEMENTS;
        let part = |offset, bytes, content| Part {
            offset,
            bytes,
            content,
            noise: *noise,
            cols: cols as usize,
        };
        // Anywhere would do; at a page it can be written directly.
        let off = at.next_multiple_of(PAGE_BYTES as u64);
        let (parts, mut entry) = if packed {
            let layout = noise.codec.layout(rows as usize, cols as usize);
            let layout =
                layout.map_err(|source| ConvertError::Layout { tensor: name.clone(), source })?;
            let (codes, scales) = (layout.codes as u64, layout.scales as u64);
            let parts = vec![part(0, codes, Content::Codes), part(codes, scales, Content::Scales)];
            (parts, json!({ "fmt": fmt, "group": GROUP, "scale_off": off + codes }))
        } else {
            (vec![part(0, 4 * rows * cols, Content::Plain)], json!({ "fmt": 0 }))
        };
        let bytes: u64 = parts.iter().map(|part| part.bytes).sum();
        entry["name"] = name.as_str().into();
        entry["off"] = off.into();
        entry["shape"] = shape.as_slice().into();
        entry["bytes"] = bytes.into();
        list.push(entry);
        regions.push(Region { offset: off, bytes, parts });
        at = off + bytes;
    }
    Ok((regions, list.into()))
}

/// Name of a layer's bank.
pub(super) fn bank_file(layer: u32) -> String {
    format!("experts-L{layer}.bin")
}

/// `codebooks.bin`: the tables of every layer with experts.
pub(super) fn codebook_file(seed: u64, n_banks: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let bytes = 2 * 8 * VQ.entries;
    for matrix in 0..3 * n_banks as u64 {
        let tables = codebooks(key(seed, &[u64::MAX, matrix]), VQ);
        for (stage, table) in (0u16..).zip(tables.chunks_exact(bytes)) {
            out.extend(b"WCBK");
            out.extend((matrix as u16 * VQ.stages as u16 + stage).to_le_bytes());
            out.extend([FMT, 8]);
            out.extend((VQ.entries as u32).to_le_bytes());
            out.extend([0; 4]);
            out.extend(table);
        }
    }
    out
}

/// `manifest.json`.
pub(super) fn manifest(config: Value, shapes: &Shapes, record: &Record, trunk: Value) -> Vec<u8> {
    let nested = config["text_config"].is_object();
    let config = match config {
        Value::Object(mut outer) if nested => {
            let mut text = outer.remove("text_config").unwrap_or_default();
            text["_outer"] = outer.into();
            text
        }
        config => config,
    };
    let mut layers = serde_json::Map::new();
    for (bank, layer) in shapes.moe_layers.clone().enumerate() {
        let entry = json!({
            "file": bank_file(layer),
            "experts": shapes.experts.n,
            "bytes": u64::from(shapes.experts.n) * record.bytes as u64,
            "codebook_base": bank * usize::from(BOOKS),
        });
        layers.insert(layer.to_string(), entry);
    }
    let manifest = json!({
        "format_version": 0,
        "arch": if nested { "kimi-k3" } else { "kimi-linear" },
        "tensor_prefix": if nested { "language_model." } else { "" },
        "config": config,
        "expert_quant": {
            "fmt": "VQ3R",
            "stages": VQ.stages,
            "vec_dim": 8,
            "entries": VQ.entries,
            "index_block": VQ.index_block,
            "index_bits": 8,
            "bits_per_weight": 3.0,
        },
        "layers": layers,
        "trunk": trunk,
    });
    serde_json::to_vec_pretty(&manifest).expect("plain data serialises")
}
