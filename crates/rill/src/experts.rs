//! Where routed experts come from.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use rill_format::container::Container;
use rill_format::{
    Checkpoint, DataExtent, ExpertDims, FormatError, TensorId, Waste, WasteExperts, WasteMatrix,
};
use rill_kernels::{Codec, LayoutError, Matrix, Vq};
use rill_stream::policy::Learned;
use rill_stream::{CacheCounters, Occupancy, Record};

use crate::config::{ExpertFormat, FfnKind, ModelConfig};
use crate::describe::StoredExperts;
use crate::error::{Error, ExpertError};
use crate::source::{self, Findings, Forms};
use crate::weights;

/// Index of a layer, from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIdx(pub usize);

/// Index of a routed expert within its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertId(pub u32);

impl fmt::Display for LayerIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The three matrices of one routed expert, packed as stored.
#[derive(Clone, Copy, Debug)]
pub struct Expert<'a> {
    /// w1, (intermediate, width).
    pub gate: Matrix<'a>,
    /// w3, (intermediate, width).
    pub up: Matrix<'a>,
    /// w2, (width, intermediate).
    pub down: Matrix<'a>,
}

/// Delivers routed experts to the forward pass.
///
/// The engine asks once per layer for all experts that layer needs, so that a source can have
/// every read under way at once and hand over whatever arrives first.
pub trait ExpertSource: Send + Sync {
    /// Calls `consume` exactly once for each of `experts` (ascending, without duplicates), in any
    /// order: the engine's result does not depend on it. After an error the step is abandoned.
    fn fetch(
        &self,
        layer: LayerIdx,
        experts: &[ExpertId],
        consume: &mut dyn FnMut(ExpertId, Expert<'_>),
    ) -> Result<(), Error>;

    /// Tells what each token chose in a layer, before the layer's experts are fetched: `ids`
    /// (tokens, top_k).
    fn chosen(&self, _layer: LayerIdx, _ids: &[u32], _top_k: usize) {}

    /// Names experts that a later layer is likely to want, the likeliest first.
    fn likely(&self, _layer: LayerIdx, _experts: &[u32]) {}

    /// What is worth knowing in the next run, if anything.
    fn learned(&self) -> Option<Learned> {
        None
    }

    /// What it has done since it was made.
    fn counters(&self) -> CacheCounters;

    /// Gives up to so many of its buffers back to the system; returns how many.
    fn shrink(&self, _slots: usize) -> usize {
        0
    }

    /// What its buffers are in use for; nothing if it has none.
    fn occupancy(&self) -> Occupancy {
        Occupancy::default()
    }
}

/// How a kind of folder stores its routed experts: where the bytes of one lie, whether they are
/// right, and which matrices they are.
pub(crate) trait ExpertRecords: Send + Sync {
    /// The parts of a record.
    fn extents(&self, layer: LayerIdx, expert: ExpertId) -> Vec<DataExtent>;

    /// Checks what a record says of itself, and with `verify` its checksum, where it has such.
    fn check(
        &self,
        layer: LayerIdx,
        expert: ExpertId,
        verify: bool,
        record: Record<'_>,
    ) -> Result<(), FormatError>;

    /// The matrices in a record that has been checked.
    fn view<'b>(
        &'b self,
        layer: LayerIdx,
        expert: ExpertId,
        record: Record<'b>,
        values: Values,
    ) -> Result<Expert<'b>, ExpertError>;
}

/// Whether scales and indices are still to be looked through, or were when they were read.
#[derive(Clone, Copy)]
pub(crate) enum Values {
    Unseen,
    Accepted,
}

impl Values {
    /// The matrix in these bytes; `tables` are those of a vector-quantised format.
    pub(crate) fn open<'b>(
        self,
        codec: Codec,
        rows: usize,
        cols: usize,
        codes: &'b [u8],
        scales: &'b [u8],
        tables: &'b [f32],
    ) -> Result<Matrix<'b>, LayoutError> {
        match self {
            Self::Unseen => Matrix::with_tables(codec, rows, cols, codes, scales, tables),
            Self::Accepted => Matrix::accepted(codec, rows, cols, codes, scales, tables),
        }
    }
}

/// Rows and columns of gate, up and down.
pub(crate) fn expert_shapes(config: &ModelConfig) -> [(usize, usize); 3] {
    let width = config.moe.latent.map_or(config.hidden_size, |latent| latent.size);
    let inner = config.moe.intermediate_size;
    [(inner, width), (inner, width), (width, inner)]
}

/// Layers with routed experts.
pub(crate) fn moe_layers(config: &ModelConfig) -> impl Iterator<Item = usize> + '_ {
    let layers = config.layers.iter().enumerate();
    layers.filter(|(_, layer)| layer.ffn == FfnKind::Moe).map(|(index, _)| index)
}

/// Names of gate, up and down of an expert in a published checkpoint: weights or nibbles, then
/// scales if there are any.
fn tensor_names(
    config: &ModelConfig,
    layer: usize,
    expert: usize,
) -> [(String, Option<String>); 3] {
    let prefix = weights::prefix(config);
    ["w1", "w3", "w2"].map(|w| {
        let at = format!("{prefix}model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}");
        match config.moe.expert_format {
            ExpertFormat::Bf16 => (format!("{at}.weight"), None),
            ExpertFormat::Mxfp4 => {
                (format!("{at}.weight_packed"), Some(format!("{at}.weight_scale")))
            }
        }
    })
}

/// Checks the routed experts of a published checkpoint.
pub(crate) fn check_checkpoint(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    findings: &mut Findings,
) {
    let shapes = expert_shapes(config);
    for layer in moe_layers(config) {
        for expert in 0..config.moe.n_experts {
            if findings.enough() {
                return;
            }
            let names = tensor_names(config, layer, expert);
            for ((codes, scales), (rows, cols)) in names.iter().zip(shapes) {
                match scales {
                    None => {
                        findings.tensor(checkpoint, codes, Forms::Bf16, &[&[rows, cols]]);
                    }
                    Some(scales) => {
                        findings.tensor(checkpoint, codes, Forms::Bytes, &[&[rows, cols / 2]]);
                        findings.tensor(checkpoint, scales, Forms::Bytes, &[&[rows, cols / 32]]);
                    }
                }
            }
        }
    }
}

/// Gate, up, down: weights or nibbles, and scales if there are any.
type ExpertTensors = [(TensorId, Option<TensorId>); 3];

/// Experts of a published checkpoint: up to six tensors each.
#[derive(Debug)]
pub(crate) struct CheckpointExperts {
    checkpoint: Arc<Checkpoint>,
    /// Per layer and expert.
    layers: Vec<Vec<ExpertTensors>>,
    codec: Codec,
    shapes: [(usize, usize); 3],
}

impl CheckpointExperts {
    /// Over tensors that [`check_checkpoint`] has accepted.
    pub(crate) fn new(checkpoint: Arc<Checkpoint>, config: &ModelConfig) -> Self {
        let id = |name: &str| checkpoint.find(name).expect("checked before").id;
        let mut layers = vec![Vec::new(); config.layers.len()];
        for layer in moe_layers(config) {
            layers[layer] = (0..config.moe.n_experts)
                .map(|expert| {
                    tensor_names(config, layer, expert)
                        .map(|(codes, scales)| (id(&codes), scales.as_deref().map(id)))
                })
                .collect();
        }
        let codec = match config.moe.expert_format {
            ExpertFormat::Bf16 => Codec::Bf16,
            ExpertFormat::Mxfp4 => Codec::Mxfp4,
        };
        let shapes = expert_shapes(config);
        Self { checkpoint, layers, codec, shapes }
    }

    fn tensors(&self, layer: LayerIdx, expert: ExpertId) -> &ExpertTensors {
        &self.layers[layer.0][expert.0 as usize]
    }
}

impl ExpertRecords for CheckpointExperts {
    fn extents(&self, layer: LayerIdx, expert: ExpertId) -> Vec<DataExtent> {
        let tensors = self.tensors(layer, expert).iter();
        let ids = tensors.flat_map(|&(codes, scales)| std::iter::once(codes).chain(scales));
        ids.map(|id| self.checkpoint.extent(id)).collect()
    }

    fn check(
        &self,
        _layer: LayerIdx,
        _expert: ExpertId,
        _verify: bool,
        _record: Record<'_>,
    ) -> Result<(), FormatError> {
        // A published checkpoint has no checksums.
        Ok(())
    }

    fn view<'b>(
        &'b self,
        layer: LayerIdx,
        expert: ExpertId,
        record: Record<'b>,
        values: Values,
    ) -> Result<Expert<'b>, ExpertError> {
        let tensors = self.tensors(layer, expert);
        let matrix = |i: usize| {
            let (rows, cols) = self.shapes[i];
            let (codes, scales) = tensors[i];
            let (code_bytes, scale_bytes) = match scales {
                None => (record.part(i), &[][..]),
                Some(_) => (record.part(2 * i), record.part(2 * i + 1)),
            };
            values.open(self.codec, rows, cols, code_bytes, scale_bytes, &[]).map_err(|source| {
                // The shapes were checked, so what is wrong is in the scales, if there are any.
                let info = self.checkpoint.info(scales.unwrap_or(codes));
                let file = self.checkpoint.folder().describe(info.shard);
                ExpertError::Layout { file, tensor: info.name.to_owned(), source }
            })
        };
        Ok(Expert { gate: matrix(0)?, up: matrix(1)?, down: matrix(2)? })
    }
}

/// Checks the routed experts of a `.rill` container.
pub(crate) fn check_container(
    container: &Container,
    config: &ModelConfig,
    findings: &mut Findings,
) {
    let banks: Vec<usize> = container.bank_list().iter().map(|b| b.layer as usize).collect();
    let expected: Vec<usize> = moe_layers(config).collect();
    if banks != expected {
        findings.problem(format!(
            "the banks of experts are for layers {banks:?}, expected {expected:?}"
        ));
        return;
    }
    let Some(layout) = container.layout() else { return };
    for (name, (matrix, (rows, cols))) in
        ["gate", "up", "down"].iter().zip(layout.matrices.iter().zip(expert_shapes(config)))
    {
        if (matrix.rows, matrix.cols) != (rows as u64, cols as u64) {
            findings.problem(format!(
                "the experts' {name} has shape [{}, {}], expected [{rows}, {cols}]",
                matrix.rows, matrix.cols
            ));
            continue;
        }
        let codec = source::codec(matrix.codec);
        let is_variable = codec.as_ref().is_ok_and(Codec::is_variable);
        match codec.and_then(|codec| codec.layout(rows, cols)) {
            Ok(layout)
                if (layout.codes as u64, layout.scales as u64)
                    == (matrix.code_bytes, matrix.scale_bytes) => {}
            // The largest there is; each record says how many bytes its own have.
            Ok(layout) if is_variable && matrix.code_bytes <= layout.codes as u64 => {}
            Ok(layout) => findings.problem(format!(
                "the experts' {name} as {} has {} + {} bytes, expected {} + {}",
                matrix.codec, matrix.code_bytes, matrix.scale_bytes, layout.codes, layout.scales
            )),
            Err(error) => findings.problem(format!("the experts' {name}: {error}")),
        }
    }
    for bank in container.bank_list() {
        if bank.experts as usize != config.moe.n_experts {
            findings.problem(format!(
                "the bank of layer {} has {} experts, expected {}",
                bank.layer, bank.experts, config.moe.n_experts
            ));
        }
    }
}

/// Experts of a `.rill` container: a record each.
#[derive(Debug)]
pub(crate) struct ContainerExperts {
    container: Arc<Container>,
}

impl ContainerExperts {
    /// Over a container that [`check_container`] has accepted.
    pub(crate) fn new(container: Arc<Container>) -> Self {
        Self { container }
    }
}

impl ExpertRecords for ContainerExperts {
    fn extents(&self, layer: LayerIdx, expert: ExpertId) -> Vec<DataExtent> {
        self.container.record_extents(layer.0 as u32, expert.0)
    }

    fn check(
        &self,
        layer: LayerIdx,
        expert: ExpertId,
        verify: bool,
        record: Record<'_>,
    ) -> Result<(), FormatError> {
        self.container.check_record(layer.0 as u32, expert.0, verify, record.joined()).map(|_| ())
    }

    fn view<'b>(
        &'b self,
        layer: LayerIdx,
        expert: ExpertId,
        record: Record<'b>,
        values: Values,
    ) -> Result<Expert<'b>, ExpertError> {
        let record = record.joined();
        let layout = self.container.record_layout(layer.0 as u32, expert.0, record);
        let layout = layout.map_err(ExpertError::Read)?;
        let matrix = |i: usize| {
            let stored = &layout.matrices[i];
            let (rows, cols) = (stored.rows as usize, stored.cols as usize);
            let (codes, scales) = layout.matrix(record, i);
            source::codec(stored.codec)
                .and_then(|codec| values.open(codec, rows, cols, codes, scales, &[]))
                .map_err(|source| layout_error(self.container.folder().describe(""), i, source))
        };
        Ok(Expert { gate: matrix(0)?, up: matrix(1)?, down: matrix(2)? })
    }
}

/// A matrix of a record that is none.
fn layout_error(file: String, index: usize, source: LayoutError) -> ExpertError {
    ExpertError::Layout { file, tensor: ["gate", "up", "down"][index].to_owned(), source }
}

/// Checks the routed experts of a `.waste` container.
pub(crate) fn check_waste(waste: &Waste, config: &ModelConfig, findings: &mut Findings) {
    let banks: Vec<usize> = waste.layers().keys().map(|&layer| layer as usize).collect();
    let expected: Vec<usize> = moe_layers(config).collect();
    if banks != expected {
        findings.problem(format!(
            "the banks of experts are for layers {banks:?}, expected {expected:?}"
        ));
        return;
    }
    let format = waste_codec(waste.expert_format());
    for (name, (rows, cols)) in ["gate", "up", "down"].iter().zip(expert_shapes(config)) {
        if let Err(error) = format.layout(rows, cols) {
            findings.problem(format!("the experts' {name}: {error}"));
        }
    }
    for (layer, bank) in waste.layers() {
        if bank.experts as usize != config.moe.n_experts {
            findings.problem(format!(
                "the bank of layer {layer} has {} experts, expected {}",
                bank.experts, config.moe.n_experts
            ));
        }
        for first in codebooks_of(bank.codebook_base, waste.expert_format().stages) {
            if tables(waste, first).is_none() {
                findings.problem(format!("codebook {first} of layer {layer}: missing"));
            }
        }
    }
}

/// How a `.waste` container stores its routed experts.
pub(crate) fn stored_in_waste(waste: &Waste, config: &ModelConfig) -> StoredExperts {
    // One for the trunk, one for the codebooks.
    let mut stored = StoredExperts { files: 2 + waste.layers().len(), ..Default::default() };
    let codec = waste_codec(waste.expert_format());
    let n: u64 = waste.layers().values().map(|bank| u64::from(bank.experts)).sum();
    for (rows, cols) in expert_shapes(config) {
        let layout = codec.layout(rows, cols);
        let bytes = layout.map_or(0, |layout| (layout.codes + layout.scales) as u64);
        stored.add(codec.name(), n * (rows * cols) as u64, n * bytes);
    }
    let banks = waste.layers().values();
    stored.expert_file_bytes = banks.map(|b| u64::from(b.experts) * b.record_bytes).sum();
    stored
}

/// Experts of a `.waste` container: a record each.
#[derive(Debug)]
pub(crate) struct WasteRecords {
    waste: Arc<Waste>,
    codec: Codec,
    shapes: [(usize, usize); 3],
    /// Tables of a matrix, (stages, entries, 8), by the number of its first codebook.
    tables: HashMap<u16, Vec<f32>>,
}

impl WasteRecords {
    /// Over a container that [`check_waste`] has accepted.
    pub(crate) fn new(waste: Arc<Waste>, config: &ModelConfig) -> Self {
        let stages = waste.expert_format().stages;
        let bases = waste.layers().values().map(|bank| bank.codebook_base);
        let firsts = bases.flat_map(|base| codebooks_of(base, stages));
        let tables = firsts.filter_map(|n| Some((n, tables(&waste, n)?))).collect();
        let codec = waste_codec(waste.expert_format());
        let shapes = expert_shapes(config);
        Self { waste, codec, shapes, tables }
    }

    fn dims(&self) -> ExpertDims {
        let (inter, width) = self.shapes[0];
        ExpertDims { inter, width }
    }
}

impl ExpertRecords for WasteRecords {
    fn extents(&self, layer: LayerIdx, expert: ExpertId) -> Vec<DataExtent> {
        self.waste.record_extent(layer.0 as u32, expert.0).into_iter().collect()
    }

    fn check(
        &self,
        layer: LayerIdx,
        expert: ExpertId,
        verify: bool,
        record: Record<'_>,
    ) -> Result<(), FormatError> {
        let (layer, record) = (layer.0 as u32, record.joined());
        self.waste.check_expert(layer, expert.0, self.dims(), verify, record).map(|_| ())
    }

    fn view<'b>(
        &'b self,
        layer: LayerIdx,
        expert: ExpertId,
        record: Record<'b>,
        values: Values,
    ) -> Result<Expert<'b>, ExpertError> {
        let place = self.waste.expert_places(layer.0 as u32, expert.0, self.dims())?;
        let record = record.joined();
        let matrix = |i: usize, place: &WasteMatrix| {
            let (rows, cols) = self.shapes[i];
            // Without its codebooks a matrix has no tables, which is refused.
            let tables = self.tables.get(&place.first_codebook).map_or(&[][..], Vec::as_slice);
            let (codes, scales) = (&record[place.codes.clone()], &record[place.scales.clone()]);
            values
                .open(self.codec, rows, cols, codes, scales, tables)
                .map_err(|source| layout_error(self.waste.folder().describe(""), i, source))
        };
        Ok(Expert {
            gate: matrix(0, &place.gate)?,
            up: matrix(1, &place.up)?,
            down: matrix(2, &place.down)?,
        })
    }
}

fn waste_codec(format: WasteExperts) -> Codec {
    let WasteExperts { stages, entries, index_block, packed, .. } = format;
    Codec::Vq(Vq { stages, entries, index_block, packed })
}

/// Numbers of the first codebooks of gate, up and down.
fn codebooks_of(base: u16, stages: usize) -> impl Iterator<Item = u16> {
    (0..3).map(move |matrix| base.saturating_add((matrix * stages) as u16))
}

/// The stages' codebooks from `first` on, one after another.
fn tables(waste: &Waste, first: u16) -> Option<Vec<f32>> {
    let mut tables = Vec::new();
    for stage in 0..waste.expert_format().stages as u16 {
        tables.extend_from_slice(waste.codebook(first.checked_add(stage)?)?);
    }
    Some(tables)
}
