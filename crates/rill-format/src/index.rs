//! `model.safetensors.index.json`: which shard holds which tensor.
//!
//! K3's has half a million lines, so it is read as a stream: each pair is handed on and forgotten.

use std::fmt;
use std::io::{BufReader, Read};

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::FormatError;
use crate::header::MAX_NAME_BYTES;

/// Calls `place(tensor, shard)` for each pair of the index in order. Names are at most
/// [`MAX_NAME_BYTES`] long and otherwise as written; `place` judges them.
///
/// # Errors
///
/// If the stream is not an index, or what `place` returned.
pub(crate) fn read_index(
    stream: impl Read,
    index: &str,
    place: impl FnMut(&str, &str) -> Result<(), FormatError>,
) -> Result<(), FormatError> {
    let mut read = ReadIndex { place, fault: None };
    let stream = BufReader::with_capacity(1 << 16, stream);
    let mut json = serde_json::Deserializer::from_reader(stream);
    let parsed = Top(&mut read).deserialize(&mut json).and_then(|()| json.end());
    match (parsed, read.fault) {
        (Ok(()), _) => Ok(()),
        (Err(_), Some(fault)) => Err(fault),
        (Err(error), None) if error.is_io() => {
            Err(FormatError::Io { file: index.to_owned(), doing: "reading", source: error.into() })
        }
        (Err(error), None) => {
            Err(FormatError::BadIndex { index: index.to_owned(), reason: error.to_string() })
        }
    }
}

struct ReadIndex<F> {
    place: F,
    /// What `place` returned; it cannot pass through serde's error type.
    fault: Option<FormatError>,
}

struct Top<'a, F>(&'a mut ReadIndex<F>);
struct WeightMap<'a, F>(&'a mut ReadIndex<F>);

impl<'de, F: FnMut(&str, &str) -> Result<(), FormatError>> DeserializeSeed<'de> for Top<'_, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, F: FnMut(&str, &str) -> Result<(), FormatError>> Visitor<'de> for Top<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_weight_map = false;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if has_weight_map {
                return Err(de::Error::duplicate_field("weight_map"));
            }
            has_weight_map = true;
            map.next_value_seed(WeightMap(self.0))?;
        }
        if !has_weight_map {
            return Err(de::Error::missing_field("weight_map"));
        }
        Ok(())
    }
}

impl<'de, F: FnMut(&str, &str) -> Result<(), FormatError>> DeserializeSeed<'de>
    for WeightMap<'_, F>
{
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, F: FnMut(&str, &str) -> Result<(), FormatError>> Visitor<'de> for WeightMap<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensor names and shard names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
            if tensor.len().max(shard.len()) > MAX_NAME_BYTES {
                return Err(de::Error::custom(format_args!(
                    "a name is longer than {MAX_NAME_BYTES} bytes"
                )));
            }
            if let Err(fault) = (self.0.place)(&tensor, &shard) {
                self.0.fault = Some(fault);
                return Err(de::Error::custom("refused"));
            }
        }
        Ok(())
    }
}
