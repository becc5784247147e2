//! Where routed experts come from.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rill_format::{Checkpoint, TensorId};
use rill_kernels::{Codec, Matrix};

use crate::config::{ExpertFormat, ModelConfig};
use crate::error::{Error, ExpertError};
use crate::weights::ExpertTensors;

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

    /// What has been read since the source was made.
    fn reads(&self) -> ExpertReads;
}

/// Totals of an [`ExpertSource`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertReads {
    /// Experts read.
    pub experts: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Time spent reading, in nanoseconds.
    pub read_ns: u64,
}

/// Reads each expert from the checkpoint whenever it is used, one after another.
#[derive(Debug)]
pub(crate) struct CheckpointExperts {
    checkpoint: Arc<Checkpoint>,
    layers: Vec<Vec<ExpertTensors>>,
    format: ExpertFormat,
    /// Input and output width of an expert.
    width: usize,
    intermediate: usize,
    experts: AtomicU64,
    bytes: AtomicU64,
    read_ns: AtomicU64,
}

impl CheckpointExperts {
    /// Over the tensors that the binder found and checked.
    pub(crate) fn new(
        checkpoint: Arc<Checkpoint>,
        config: &ModelConfig,
        layers: Vec<Vec<ExpertTensors>>,
    ) -> Self {
        Self {
            checkpoint,
            layers,
            format: config.moe.expert_format,
            width: config.moe.latent.map_or(config.hidden_size, |latent| latent.size),
            intermediate: config.moe.intermediate_size,
            experts: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            read_ns: AtomicU64::new(0),
        }
    }

    fn read(&self, id: ExpertId, layer: LayerIdx, out: &mut ExpertBytes) -> Result<(), Error> {
        let tensors = &self.layers[layer.0][id.0 as usize];
        let start = Instant::now();
        let mut bytes = 0;
        let parts = [tensors.gate, tensors.up, tensors.down];
        for (parts, out) in parts.iter().zip(&mut out.0) {
            let used = if self.format == ExpertFormat::Mxfp4 { 2 } else { 1 };
            for (&tensor, out) in parts.iter().zip(out).take(used) {
                let info = self.checkpoint.info(tensor);
                out.resize(info.bytes as usize, 0);
                self.checkpoint.read_into(tensor, out).map_err(|e| Error::Expert {
                    layer,
                    expert: id,
                    source: e.into(),
                })?;
                bytes += info.bytes;
            }
        }
        // Counters only: nothing is ordered by them.
        self.experts.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.read_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn view<'a>(
        &self,
        tensors: &ExpertTensors,
        bytes: &'a ExpertBytes,
    ) -> Result<Expert<'a>, ExpertError> {
        let matrix = |ids: [TensorId; 2], rows, cols, bytes: &'a [Vec<u8>; 2]| {
            match self.format {
                ExpertFormat::Bf16 => Matrix::new(Codec::Bf16, rows, cols, &bytes[0], &[]),
                ExpertFormat::Mxfp4 => Matrix::new(Codec::Mxfp4, rows, cols, &bytes[0], &bytes[1]),
            }
            // The binder checked the shapes, so what can be wrong is in the scales, if any.
            .map_err(|source| ExpertError::Layout {
                tensor: self.checkpoint.info(ids[1]).name.to_owned(),
                source,
            })
        };
        let (width, inner) = (self.width, self.intermediate);
        Ok(Expert {
            gate: matrix(tensors.gate, inner, width, &bytes.0[0])?,
            up: matrix(tensors.up, inner, width, &bytes.0[1])?,
            down: matrix(tensors.down, width, inner, &bytes.0[2])?,
        })
    }
}

/// Gate, up, down; each weights or nibbles, and scales.
#[derive(Default)]
struct ExpertBytes([[Vec<u8>; 2]; 3]);

impl ExpertSource for CheckpointExperts {
    fn fetch(
        &self,
        layer: LayerIdx,
        experts: &[ExpertId],
        consume: &mut dyn FnMut(ExpertId, Expert<'_>),
    ) -> Result<(), Error> {
        let mut bytes = ExpertBytes::default();
        for &id in experts {
            self.read(id, layer, &mut bytes)?;
            let tensors = &self.layers[layer.0][id.0 as usize];
            let expert = self.view(tensors, &bytes).map_err(|source| Error::Expert {
                layer,
                expert: id,
                source,
            })?;
            consume(id, expert);
        }
        Ok(())
    }

    fn reads(&self) -> ExpertReads {
        ExpertReads {
            experts: self.experts.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            read_ns: self.read_ns.load(Ordering::Relaxed),
        }
    }
}
