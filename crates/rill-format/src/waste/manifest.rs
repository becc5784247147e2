//! `manifest.json` of a `.waste` container: what lies where, checked until it can be trusted.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::record::PAGE_BYTES;
use crate::header::MAX_NAME_BYTES;
use crate::{FormatError, MAX_RANK};

/// Weights of one codebook entry.
pub(super) const VEC_DIM: usize = 8;

/// A checked manifest. It is true of itself and of `trunk.bin`'s size; the other files are
/// checked when they are opened.
#[derive(PartialEq, Debug)]
pub struct WasteManifest {
    /// The model's configuration as its release has it.
    pub config_json: Vec<u8>,
    /// The number format of all experts.
    pub experts: WasteExperts,
    /// Layers with experts, by number.
    pub layers: BTreeMap<u32, WasteLayer>,
    /// Tensors of the trunk in file order; distinct names, no two share bytes.
    pub tensors: Vec<WasteTensor>,
}

/// The number format of experts: `stages` codebook entries of eight weights are added up, then
/// multiplied by the row's scale.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WasteExperts {
    /// Codebook entries that are added up: 2 or 3, or 4 if packed.
    pub stages: usize,
    /// Entries of a codebook, at most 256.
    pub entries: usize,
    /// Rows whose indices are interleaved, 64; 0 for none.
    pub index_block: usize,
    /// Whether four indices of six bits share three bytes.
    pub packed: bool,
}

/// A layer's bank of experts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WasteLayer {
    /// Name of the bank.
    pub file: String,
    /// Experts in it.
    pub experts: u32,
    /// Bytes of each expert's record, a multiple of 4096.
    pub record_bytes: u64,
    /// Number of the first codebook of the layer's gates; those of ups and downs follow.
    pub codebook_base: u16,
}

/// How a tensor of the trunk is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WasteFormat {
    /// Little-endian f32.
    F32,
    /// Signed bytes, and one f16 scale per group of inputs.
    Q8,
    /// Four bits plus 8, two to a byte, and scales as for `Q8`.
    Q4,
    /// Three bits plus 4, and scales as for `Q8`. Read as `Q8`.
    Q3,
}

/// A tensor of the trunk. Its rows are its first dimension, its columns all the others.
#[derive(PartialEq, Eq, Debug)]
pub struct WasteTensor {
    /// Full name.
    pub name: String,
    /// Dimensions, outermost first, all at least 1.
    pub shape: Vec<u64>,
    /// How it is stored.
    pub format: WasteFormat,
    /// Inputs that share a scale; 0 for `F32`.
    pub group: u32,
    pub(super) rows: u64,
    pub(super) cols: u64,
    place: Range<u64>,
    pub(super) scales_at: u64,
}

impl WasteTensor {
    /// Where it lies in `trunk.bin`, scales included.
    pub fn place(&self) -> Range<u64> {
        self.place.clone()
    }

    /// Bytes of a row of codes in the file.
    pub(super) fn stored_row_bytes(&self) -> u64 {
        stored_row_bytes(self.format, u64::from(self.group), self.cols)
            .expect("the manifest's check computed it")
    }

    /// Bytes of a row of codes without padding, `Q3` as `Q8`.
    pub(super) fn row_bytes(&self) -> u64 {
        match self.format {
            WasteFormat::F32 => self.cols * 4,
            WasteFormat::Q8 | WasteFormat::Q3 => self.cols,
            WasteFormat::Q4 => self.cols.div_ceil(2),
        }
    }

    /// Bytes of a row of scales.
    pub(super) fn scale_row_bytes(&self) -> u64 {
        match self.format {
            WasteFormat::F32 => 0,
            _ => 2 * self.cols.div_ceil(u64::from(self.group)),
        }
    }
}

/// Parses and checks a manifest. `manifest` is used in messages, `trunk_bytes` is the size of
/// `trunk.bin`.
///
/// # Errors
///
/// If the version is not 0, if it is not the JSON it should be, or the first value found that
/// cannot be true.
pub fn parse_waste_manifest(
    manifest: &str,
    json: &[u8],
    trunk_bytes: u64,
) -> Result<WasteManifest, FormatError> {
    let invalid = |error: serde_json::Error| FormatError::BadManifest {
        manifest: manifest.to_owned(),
        reason: error.to_string(),
    };
    let version = serde_json::from_slice::<Head>(json).map_err(invalid)?.format_version;
    if version.as_ref().and_then(Value::as_u64) != Some(0) {
        let found = version.map_or("(none)".to_owned(), |version| version.to_string());
        let found = found.chars().take(40).collect();
        return Err(FormatError::WasteVersion { manifest: manifest.to_owned(), found });
    }

    let json: Manifest<'_> = serde_json::from_slice(json).map_err(invalid)?;
    let check = Check { manifest };
    let experts = check.experts(&json.expert_quant)?;
    Ok(WasteManifest {
        config_json: check.config(json.config)?,
        experts,
        layers: check.layers(json.layers.0, experts)?,
        tensors: check.trunk(json.trunk, trunk_bytes)?,
    })
}

/// Whether this is a manifest of a `.waste` container of any version.
pub(super) fn is_manifest(json: &[u8]) -> bool {
    let head: Head = match serde_json::from_slice(json) {
        Ok(head) => head,
        Err(_) => return false,
    };
    head.format_version.is_some() && head.format.as_ref().and_then(Value::as_str) != Some("rill")
}

/// Inputs that a group may hold, what the products can take. Real containers have 128.
const GROUPS: std::ops::RangeInclusive<u64> = 16..=1024;

/// Rows whose indices are interleaved, in containers that interleave.
const INDEX_BLOCK: u64 = 64;

/// What tells versions and formats apart.
#[derive(Deserialize)]
struct Head {
    format_version: Option<Value>,
    format: Option<Value>,
}

#[derive(Deserialize)]
struct Manifest<'a> {
    #[serde(borrow)]
    config: &'a RawValue,
    expert_quant: ExpertQuant,
    layers: Pairs<Layer>,
    trunk: Vec<Tensor>,
}

#[derive(Deserialize)]
struct ExpertQuant {
    stages: u64,
    vec_dim: u64,
    entries: u64,
    index_block: u64,
    #[serde(default = "eight")]
    index_bits: u64,
}

fn eight() -> u64 {
    8
}

#[derive(Deserialize)]
struct Layer {
    file: String,
    experts: u64,
    bytes: u64,
    codebook_base: u64,
}

#[derive(Deserialize)]
struct Tensor {
    name: String,
    fmt: u64,
    off: u64,
    shape: Vec<u64>,
    group: Option<u64>,
    scale_off: Option<u64>,
    bytes: u64,
}

/// The checks, with the file's name for messages.
struct Check<'a> {
    manifest: &'a str,
}

impl Check<'_> {
    /// Assembles `config.json`: the text configuration inside the multimodal one, when there was
    /// one. Numbers and strings stay as written.
    fn config(&self, config: &RawValue) -> Result<Vec<u8>, FormatError> {
        let invalid = |error: serde_json::Error| FormatError::BadManifest {
            manifest: self.manifest.to_owned(),
            reason: format!("config: {error}"),
        };
        let mut text: Pairs<&RawValue> = serde_json::from_str(config.get()).map_err(invalid)?;
        let Some(outer) = text.0.iter().position(|(key, _)| key == "_outer") else {
            return Ok(config.get().as_bytes().to_vec());
        };
        let (_, outer) = text.0.remove(outer);
        let mut outer: Pairs<&RawValue> = serde_json::from_str(outer.get()).map_err(invalid)?;
        for (pairs, key) in [(&text, "_outer"), (&outer, "text_config")] {
            if pairs.0.iter().any(|(other, _)| other == key) {
                return Err(self.field("config", format!("one {key:?}"), "two".to_owned()));
            }
        }
        let text = serde_json::value::to_raw_value(&text).map_err(invalid)?;
        outer.0.push(("text_config".to_owned(), &text));
        serde_json::to_vec(&outer).map_err(invalid)
    }

    fn experts(&self, quant: &ExpertQuant) -> Result<WasteExperts, FormatError> {
        let field = |name: &str, expected: &str, found: u64| {
            Err(self.field(&format!("expert_quant.{name}"), expected.to_owned(), found.to_string()))
        };
        let packed = match (quant.index_bits, quant.stages) {
            (8, 2 | 3) => false,
            (6, 4) => true,
            (8, stages) => return field("stages", "2 or 3 with indices of 8 bits", stages),
            (6, stages) => return field("stages", "4 with indices of 6 bits", stages),
            (bits, _) => return field("index_bits", "6 or 8", bits),
        };
        match quant.entries {
            64 => {}
            1..=256 if !packed => {}
            entries if packed => return field("entries", "64 with indices of 6 bits", entries),
            entries => return field("entries", "1 to 256", entries),
        }
        if quant.vec_dim != VEC_DIM as u64 {
            return field("vec_dim", "8", quant.vec_dim);
        }
        if !matches!(quant.index_block, 0 | INDEX_BLOCK) {
            return field("index_block", "0 or 64", quant.index_block);
        }
        Ok(WasteExperts {
            stages: quant.stages as usize,
            entries: quant.entries as usize,
            index_block: quant.index_block as usize,
            packed,
        })
    }

    fn layers(
        &self,
        layers: Vec<(String, Layer)>,
        experts: WasteExperts,
    ) -> Result<BTreeMap<u32, WasteLayer>, FormatError> {
        let mut checked = BTreeMap::new();
        let mut files = HashSet::new();
        for (key, layer) in layers {
            let field = |name: &str, expected: &str, found: String| {
                let key: String = key.chars().take(40).collect();
                Err(self.field(&format!("layers.{key}{name}"), expected.to_owned(), found))
            };
            // Only the plain way to write a number, so that no layer has two.
            let number = key.parse().ok().filter(|n: &u16| n.to_string() == key);
            let Some(number) = number.map(u32::from) else {
                return field("", "a layer number below 65536", format!("{key:?}"));
            };
            if !is_plain_name(&layer.file) {
                return field(".file", "a plain file name", format!("{:?}", layer.file));
            }
            let n_experts = match u32::try_from(layer.experts) {
                Ok(n @ 1..=0x1_0000) => n,
                _ => return field(".experts", "1 to 65536", layer.experts.to_string()),
            };
            let record_bytes = layer.bytes / layer.experts;
            if record_bytes == 0 || !layer.bytes.is_multiple_of(layer.experts * PAGE_BYTES) {
                let expected = format!("{n_experts} records in multiples of {PAGE_BYTES} bytes");
                return field(".bytes", &expected, layer.bytes.to_string());
            }
            let n_codebooks = 3 * experts.stages as u64;
            let codebook_base = match u16::try_from(layer.codebook_base) {
                Ok(base) if u64::from(base) + n_codebooks <= 0x1_0000 => base,
                _ => {
                    let expected = format!("at most {}", 0x1_0000 - n_codebooks);
                    return field(".codebook_base", &expected, layer.codebook_base.to_string());
                }
            };
            if !files.insert(layer.file.clone()) {
                let found = format!("{:?}", layer.file);
                return field(".file", "a bank of its own", found);
            }
            let file = layer.file;
            let layer = WasteLayer { file, experts: n_experts, record_bytes, codebook_base };
            if checked.insert(number, layer).is_some() {
                return field("", "once", "twice".to_owned());
            }
        }
        Ok(checked)
    }

    /// The tensors in file order.
    fn trunk(
        &self,
        tensors: Vec<Tensor>,
        trunk_bytes: u64,
    ) -> Result<Vec<WasteTensor>, FormatError> {
        let mut names = HashSet::with_capacity(tensors.len());
        let mut checked = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            if tensor.name.len() > MAX_NAME_BYTES {
                return Err(FormatError::NameTooLong {
                    shard: self.manifest.to_owned(),
                    tensor: tensor.name.chars().take(64).collect(),
                    found: tensor.name.len(),
                    max_bytes: MAX_NAME_BYTES,
                });
            }
            if !names.insert(tensor.name.clone()) {
                return Err(FormatError::DuplicateTensor {
                    tensor: tensor.name,
                    shard: self.manifest.to_owned(),
                    other: self.manifest.to_owned(),
                });
            }
            checked.push(self.tensor(tensor, trunk_bytes)?);
        }
        checked.sort_by_key(|tensor| tensor.place.start);
        for pair in checked.windows(2) {
            let (before, after) = (&pair[0], &pair[1]);
            if after.place.start < before.place.end {
                return Err(FormatError::Overlap {
                    shard: self.manifest.to_owned(),
                    tensor: after.name.clone(),
                    other: before.name.clone(),
                    byte: after.place.start,
                });
            }
        }
        Ok(checked)
    }

    fn tensor(&self, tensor: Tensor, trunk_bytes: u64) -> Result<WasteTensor, FormatError> {
        let field = |field: &str, expected: String, found: String| FormatError::ManifestField {
            manifest: self.manifest.to_owned(),
            tensor: Some(tensor.name.clone()),
            field: field.to_owned(),
            expected,
            found,
        };
        let format = match tensor.fmt {
            0 => WasteFormat::F32,
            2 => WasteFormat::Q8,
            3 => WasteFormat::Q4,
            7 => WasteFormat::Q3,
            fmt => return Err(field("fmt", "0, 2, 3 or 7".to_owned(), fmt.to_string())),
        };
        let ranks = if format == WasteFormat::F32 { 0..=MAX_RANK } else { 2..=MAX_RANK };
        if !ranks.contains(&tensor.shape.len()) || tensor.shape.contains(&0) {
            let (least, most) = (ranks.start(), ranks.end());
            let dims: Vec<_> = tensor.shape.iter().take(MAX_RANK + 1).collect();
            let expected = format!("{least} to {most} dimensions of at least 1");
            return Err(field("shape", expected, format!("{dims:?}")));
        }
        let group = match format {
            WasteFormat::F32 => 0,
            _ => match tensor.group {
                Some(group) if GROUPS.contains(&group) && group.is_multiple_of(16) => group,
                group => {
                    let found = group.map_or("absent".to_owned(), |group| group.to_string());
                    return Err(field("group", "a multiple of 16 up to 1024".to_owned(), found));
                }
            },
        };

        let rows = tensor.shape.first().copied().unwrap_or(1);
        let sizes = || {
            let cols = tensor.shape.iter().skip(1).try_fold(1u64, |n, &dim| n.checked_mul(dim))?;
            // Elements have to be countable too: in three bits they take fewer bytes.
            rows.checked_mul(cols)?;
            let codes = stored_row_bytes(format, group, cols)?.checked_mul(rows)?;
            let scales = match format {
                WasteFormat::F32 => 0,
                _ => cols.div_ceil(group).checked_mul(2)?.checked_mul(rows)?,
            };
            Some((cols, scales, codes.checked_add(scales)?))
        };
        let end = tensor.off.checked_add(tensor.bytes);
        let (Some((cols, scales, bytes)), Some(end)) = (sizes(), end) else {
            let found = format!("{:?} at {}", tensor.shape, tensor.off);
            return Err(field("shape", "countable in 64 bits".to_owned(), found));
        };
        if end > trunk_bytes {
            return Err(FormatError::WasteTrunkCutOff {
                manifest: self.manifest.to_owned(),
                tensor: tensor.name,
                expected: end,
                found: trunk_bytes,
            });
        }
        if tensor.bytes != bytes {
            return Err(field("bytes", bytes.to_string(), tensor.bytes.to_string()));
        }
        // Scales follow the codes. Their offset may be counted from the tensor or from the file.
        let scales_at = end - scales;
        let scale_off = tensor.scale_off.unwrap_or(0);
        if scales > 0 && scale_off != scales_at && scale_off != scales_at - tensor.off {
            let expected = format!("{} or {scales_at}", scales_at - tensor.off);
            return Err(field("scale_off", expected, scale_off.to_string()));
        }
        Ok(WasteTensor {
            name: tensor.name,
            shape: tensor.shape,
            format,
            group: group as u32,
            rows,
            cols,
            place: tensor.off..end,
            scales_at,
        })
    }

    fn field(&self, field: &str, expected: String, found: String) -> FormatError {
        FormatError::ManifestField {
            manifest: self.manifest.to_owned(),
            tensor: None,
            field: field.to_owned(),
            expected,
            found,
        }
    }
}

/// Bytes of a row of codes in the file, padded to whole groups except in `Q3`, where rows are bit
/// streams with a byte to spare.
fn stored_row_bytes(format: WasteFormat, group: u64, cols: u64) -> Option<u64> {
    match format {
        WasteFormat::F32 => cols.checked_mul(4),
        WasteFormat::Q8 => cols.checked_next_multiple_of(group),
        WasteFormat::Q4 => Some(cols.checked_next_multiple_of(group)? / 2),
        WasteFormat::Q3 => Some(cols.checked_mul(3)?.div_ceil(8) + 1),
    }
}

/// Whether a name stays inside its folder on every platform.
fn is_plain_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 255 && !name.starts_with('.') && name.chars().all(plain)
}

/// An object's entries as written: a map type would silently keep one of two of the same name.
struct Pairs<T>(Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Pairs<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<T>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Pairs(entries))
            }
        }

        json.deserialize_map(Entries(PhantomData))
    }
}

impl<T: Serialize> Serialize for Pairs<T> {
    fn serialize<S: Serializer>(&self, json: S) -> Result<S::Ok, S::Error> {
        json.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}
