//! The header of a safetensors shard: a JSON object of tensors, checked until it can be trusted.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::tensor::size_bytes;
use crate::{Dtype, FormatError, Shape};

/// The longest tensor name that is accepted. Published ones stay below 100 bytes.
pub(crate) const MAX_NAME_BYTES: usize = 1024;

/// One tensor of a shard, as its header describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeaderEntry {
    /// Full name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Shape,
    /// First byte, counted from the start of the payload.
    pub begin: u64,
    /// One past the last byte, counted from the start of the payload.
    pub end: u64,
}

/// Parses a shard's header: the JSON after the eight bytes of length, which may end in spaces.
/// `shard` is used in messages, `payload_bytes` is what follows the header in the file.
///
/// The entries come back in payload order. Their names are distinct, their sizes agree with their
/// shapes, and together they cover the payload once: no overlap, no gap, nothing beyond the end.
///
/// # Errors
///
/// The first violation found, naming the tensor.
pub fn parse_header(
    shard: &str,
    header: &[u8],
    payload_bytes: u64,
) -> Result<Vec<HeaderEntry>, FormatError> {
    let mut parse = Parse { shard, tensor: None, entries: Vec::new(), fault: None };
    // The format wants the brace first; JSON would allow spaces there.
    if header.first() != Some(&b'{') {
        return Err(parse.invalid("it does not start with '{'".to_owned()));
    }
    let mut json = serde_json::Deserializer::from_slice(header);
    let parsed = parse.deserialize(&mut json).and_then(|()| json.end());
    if let Err(error) = parsed {
        return Err(match parse.fault.take() {
            Some(fault) => fault,
            None => parse.invalid(error.to_string()),
        });
    }

    let mut entries = parse.entries;
    check_names(shard, &entries)?;
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    check_layout(shard, &entries, payload_bytes)?;
    Ok(entries)
}

fn check_names(shard: &str, entries: &[HeaderEntry]) -> Result<(), FormatError> {
    let mut names = HashSet::with_capacity(entries.len());
    match entries.iter().find(|entry| !names.insert(&entry.name)) {
        Some(entry) => Err(FormatError::DuplicateTensor {
            tensor: entry.name.clone(),
            shard: shard.to_owned(),
            other: shard.to_owned(),
        }),
        None => Ok(()),
    }
}

/// `entries` are sorted by position.
fn check_layout(
    shard: &str,
    entries: &[HeaderEntry],
    payload_bytes: u64,
) -> Result<(), FormatError> {
    let shard = || shard.to_owned();
    let mut covered = 0;
    let mut previous = "";
    for entry in entries {
        let tensor = || entry.name.clone();
        if entry.begin < covered {
            return Err(FormatError::Overlap {
                shard: shard(),
                tensor: tensor(),
                other: previous.to_owned(),
                byte: entry.begin,
            });
        }
        if entry.begin > covered {
            return Err(FormatError::Gap {
                shard: shard(),
                tensor: Some(tensor()),
                begin: covered,
                end: entry.begin,
            });
        }
        if entry.end > payload_bytes {
            return Err(FormatError::PayloadCutOff {
                shard: shard(),
                tensor: tensor(),
                expected: entry.end,
                found: payload_bytes,
            });
        }
        covered = entry.end;
        previous = &entry.name;
    }
    if covered < payload_bytes {
        return Err(FormatError::Gap {
            shard: shard(),
            tensor: None,
            begin: covered,
            end: payload_bytes,
        });
    }
    Ok(())
}

/// Collects entries from the JSON. A fault with a name of its own cannot pass through serde's
/// error type, so it is left in `fault`.
struct Parse<'a> {
    shard: &'a str,
    /// The tensor being read.
    tensor: Option<String>,
    entries: Vec<HeaderEntry>,
    fault: Option<FormatError>,
}

impl Parse<'_> {
    fn invalid(&self, reason: String) -> FormatError {
        let last = self.entries.last().map(|entry| &entry.name);
        FormatError::BadHeader {
            shard: self.shard.to_owned(),
            tensor: self.tensor.as_ref().or(last).cloned(),
            reason,
        }
    }

    fn check_name(&self, name: &str) -> Result<(), FormatError> {
        if name.len() <= MAX_NAME_BYTES {
            return Ok(());
        }
        Err(FormatError::NameTooLong {
            shard: self.shard.to_owned(),
            tensor: name.chars().take(64).collect(),
            found: name.len(),
            max_bytes: MAX_NAME_BYTES,
        })
    }

    fn check_entry(&self, name: String, raw: &RawEntry<'_>) -> Result<HeaderEntry, FormatError> {
        let shard = || self.shard.to_owned();
        let tensor = || name.clone();
        let dtype = Dtype::from_name(&raw.dtype).ok_or_else(|| FormatError::UnknownDtype {
            shard: shard(),
            tensor: tensor(),
            found: raw.dtype.chars().take(32).collect(),
        })?;
        let shape = raw
            .shape
            .0
            .ok_or_else(|| FormatError::RankTooLarge { shard: shard(), tensor: tensor() })?;
        let bytes = size_bytes(dtype, &shape).ok_or_else(|| FormatError::SizeOverflow {
            shard: shard(),
            tensor: tensor(),
            shape: shape.to_vec(),
            dtype,
        })?;
        let [begin, end] = raw.data_offsets;
        if end.checked_sub(begin) != Some(bytes) {
            return Err(FormatError::SizeMismatch {
                shard: shard(),
                tensor: tensor(),
                shape: shape.to_vec(),
                dtype,
                expected: bytes,
                begin,
                end,
            });
        }
        Ok(HeaderEntry { name, dtype, shape, begin, end })
    }
}

impl<'de> DeserializeSeed<'de> for &mut Parse<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Parse<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if has_metadata {
                    return Err(de::Error::duplicate_field("__metadata__"));
                }
                has_metadata = true;
                map.next_value::<Metadata>()?;
                continue;
            }
            if let Err(fault) = self.check_name(&name) {
                self.fault = Some(fault);
                return Err(de::Error::custom("refused"));
            }
            self.tensor = Some(name);
            let raw = map.next_value::<RawEntry<'de>>()?;
            let name = self.tensor.take().expect("it was set two lines above");
            match self.check_entry(name, &raw) {
                Ok(entry) => self.entries.push(entry),
                Err(fault) => {
                    self.fault = Some(fault);
                    return Err(de::Error::custom("refused"));
                }
            }
        }
        Ok(())
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: RawShape,
    data_offsets: [u64; 2],
}

/// `None` for more dimensions than a [`Shape`] holds; they are counted past, not stored, so a
/// header of nothing but dimensions takes no memory.
struct RawShape(Option<Shape>);

impl<'de> Deserialize<'de> for RawShape {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Dims;

        impl<'de> Visitor<'de> for Dims {
            type Value = RawShape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut dims: A) -> Result<RawShape, A::Error> {
                let mut shape = Shape::scalar();
                let mut fits = true;
                while let Some(dim) = dims.next_element()? {
                    fits &= shape.push(dim);
                }
                Ok(RawShape(fits.then_some(shape)))
            }
        }

        json.deserialize_seq(Dims)
    }
}

/// `__metadata__` maps strings to strings; nothing in it is used, so nothing is kept.
struct Metadata;

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Strings;

        impl<'de> Visitor<'de> for Strings {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                while map.next_entry::<String, String>()?.is_some() {}
                Ok(Metadata)
            }
        }

        json.deserialize_map(Strings)
    }
}
