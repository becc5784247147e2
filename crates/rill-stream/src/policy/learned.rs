use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::files::{Access, read_whole, write_whole};
use crate::{ExpertKey, Geometry, StreamError};

/// How often each record was used in the long run, kept from one run to the next.
///
/// Only a hint: a run without it, or with another model's, gives the same results after more reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Learned {
    geometry: Geometry,
    /// Uses, decayed with a half-life of 1,000 tokens, `(n_layers, n_experts)`
    counts: Vec<f32>,
}

impl Learned {
    pub(super) fn new(geometry: Geometry, counts: Vec<f32>) -> Self {
        assert_eq!(counts.len(), geometry.n_records(), "one count for each record");
        Self { geometry, counts }
    }

    /// Reads what was learned about the model of this fingerprint and geometry.
    ///
    /// # Errors
    ///
    /// If there is no such file, if it is damaged, or if it is about another model. Whoever asked
    /// reports that and goes on without.
    pub fn read(path: &Path, fingerprint: &str, geometry: Geometry) -> Result<Self, StreamError> {
        let bytes = read_whole(path, MAX_FILE_BYTES)?;
        let wrong = |what, expected: String, found: String| StreamError::Hint {
            file: path.to_owned(),
            what,
            expected,
            found,
        };
        let file: HintFile = serde_json::from_slice(&bytes)
            .map_err(|e| wrong("content", "what Rill learned".to_owned(), e.to_string()))?;
        if file.fingerprint != fingerprint {
            let (expected, found) = (format!("{fingerprint:?}"), format!("{:?}", file.fingerprint));
            return Err(wrong("model", expected, found));
        }
        let stated = Geometry { n_layers: file.n_layers, n_experts: file.n_experts };
        if stated != geometry {
            return Err(wrong("size of the model", describe(geometry), describe(stated)));
        }
        if file.counts.len() != geometry.n_records() {
            let expected = geometry.n_records().to_string();
            return Err(wrong("number of counts", expected, file.counts.len().to_string()));
        }
        let checksum = checksum(&file.counts);
        if checksum != file.checksum {
            return Err(wrong("checksum", file.checksum.to_string(), checksum.to_string()));
        }
        let counts = file.counts.iter().map(|&n| n as f32 / UNIT).collect();
        Ok(Self { geometry, counts })
    }

    /// Writes it to a file, which appears whole or not at all, for the model of this fingerprint.
    ///
    /// # Errors
    ///
    /// If the disk does not take it; an older file of this name then stays as it was.
    pub fn write(&self, path: &Path, fingerprint: &str) -> Result<(), StreamError> {
        let counts: Vec<u32> = self.counts.iter().map(|&n| (n * UNIT).round() as u32).collect();
        let file = HintFile {
            fingerprint: fingerprint.to_owned(),
            n_layers: self.geometry.n_layers,
            n_experts: self.geometry.n_experts,
            checksum: checksum(&counts),
            counts,
        };
        write_whole(path, Access::Usual, |out| {
            serde_json::to_writer(out, &file).map_err(io::Error::from)
        })
    }

    /// Layers and experts.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Uses of a record, decayed with a half-life of 1,000 tokens.
    ///
    /// # Panics
    ///
    /// If the model has no such record.
    #[must_use]
    pub fn count(&self, key: ExpertKey) -> f32 {
        self.counts[self.geometry.index(key)]
    }

    /// The `n` records that were used most, those first, as far as any were.
    #[must_use]
    pub fn hottest(&self, n: usize) -> Vec<ExpertKey> {
        let layers = 0..self.geometry.n_layers;
        let keys = layers.flat_map(|layer| {
            (0..self.geometry.n_experts).map(move |expert| ExpertKey { layer, expert })
        });
        let mut used: Vec<ExpertKey> = keys.filter(|&key| self.count(key) > 0.0).collect();
        // Stable: equal counts stay in the order of keys.
        used.sort_by(|&a, &b| self.count(b).total_cmp(&self.count(a)));
        used.truncate(n);
        used
    }

    pub(super) fn counts(&self) -> &[f32] {
        &self.counts
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HintFile {
    fingerprint: String,
    n_layers: u32,
    n_experts: u32,
    /// CRC-32 of the counts as little-endian u32.
    checksum: u32,
    /// In units of 1/1,024: whole numbers survive JSON bit for bit.
    counts: Vec<u32>,
}

fn checksum(counts: &[u32]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for count in counts {
        hasher.update(&count.to_le_bytes());
    }
    hasher.finalize()
}

fn describe(geometry: Geometry) -> String {
    format!("{} layers of {} experts", geometry.n_layers, geometry.n_experts)
}

/// Up to eleven characters for each of the most records a recording may have.
const MAX_FILE_BYTES: u64 = 1 << 24;
/// Parts of a use that a count is rounded to.
const UNIT: f32 = 1024.0;
