//! The first layers of a model as a model of its own.

use rill_format::{Folder, FormatError};

use crate::config;
use crate::error::ConvertError;
use crate::place::{RunKey, run_key};
use crate::plan::MAX_SMALL_BYTES;
use crate::source::{ConvertSource, SourceExperts, SourceTensor, StoredBytes};

const CONFIG: &str = "config.json";

/// A source without the layers from some number on. Its `config.json` says so; embedding, final norm
/// and head are the whole model's. The result runs, and its layers compute what they do in the whole
/// model, but it was never trained to stop there.
pub struct FirstLayers<'a> {
    source: &'a dyn ConvertSource,
    layers: u32,
    config_json: Vec<u8>,
}

impl<'a> FirstLayers<'a> {
    /// Cuts a source to its first `layers` layers.
    ///
    /// # Errors
    /// When there are not so many, or none of them has experts.
    pub fn new(source: &'a dyn ConvertSource, layers: u32) -> Result<Self, ConvertError> {
        let config_json = config::cut(&config_json(source)?, layers)?;
        Ok(Self { source, layers, config_json })
    }

    /// Cuts a source to as many layers as `like` has; `None` when it has no more than that.
    ///
    /// # Errors
    /// When a configuration is missing or does not say how many.
    pub fn as_many_as(
        like: &dyn ConvertSource,
        source: &'a dyn ConvertSource,
    ) -> Result<Option<Self>, ConvertError> {
        let layers = n_layers(like)?;
        if layers >= n_layers(source)? { Ok(None) } else { Self::new(source, layers).map(Some) }
    }
}

impl ConvertSource for FirstLayers<'_> {
    fn folder(&self) -> Folder {
        self.source.folder()
    }

    fn small_file(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>, FormatError> {
        match name {
            CONFIG => Ok(Some(self.config_json.clone())),
            name => self.source.small_file(name, max_bytes),
        }
    }

    fn identity(&self) -> String {
        format!("{} layers of {}", self.layers, self.source.identity())
    }

    fn check(&self) -> Result<(), FormatError> {
        self.source.check()
    }

    fn files(&self) -> Vec<String> {
        self.source.files()
    }

    fn trunk(&self) -> Vec<SourceTensor> {
        let mut trunk = self.source.trunk();
        trunk.retain(|tensor| match run_key(&tensor.name) {
            RunKey::Layer(layer) => layer < self.layers,
            RunKey::Global | RunKey::Vision => true,
        });
        trunk
    }

    fn read_rows(
        &self,
        tensor: &SourceTensor,
        first: u64,
        n: u64,
    ) -> Result<StoredBytes, FormatError> {
        self.source.read_rows(tensor, first, n)
    }

    fn experts(&self) -> Result<Option<SourceExperts>, ConvertError> {
        Ok(self.source.experts()?.map(|experts| experts.below(self.layers)))
    }

    fn expert_files(&self, experts: &SourceExperts, bank: usize, expert: u32) -> Vec<&str> {
        self.source.expert_files(experts, bank, expert)
    }

    fn read_expert(
        &self,
        experts: &SourceExperts,
        bank: usize,
        expert: u32,
    ) -> Result<[StoredBytes; 3], FormatError> {
        self.source.read_expert(experts, bank, expert)
    }
}

fn config_json(source: &dyn ConvertSource) -> Result<Vec<u8>, ConvertError> {
    let missing = || FormatError::MissingFile { file: source.folder().describe(CONFIG) };
    Ok(source.small_file(CONFIG, MAX_SMALL_BYTES)?.ok_or_else(missing)?)
}

fn n_layers(source: &dyn ConvertSource) -> Result<u32, ConvertError> {
    let config = config::parse(&config_json(source)?)?;
    let n = config::number(config::text(&config), "num_hidden_layers", config::MAX_LAYERS)?;
    Ok(n as u32)
}
