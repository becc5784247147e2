//! The few numbers of `config.json` that shapes depend on, and cutting it to its first layers.

use serde_json::Value;

use crate::error::ConvertError;

/// The largest number a configuration may have, so that no product of four overflows.
pub(crate) const MAX_NUMBER: u64 = 1 << 18;
pub(crate) const MAX_LAYERS: u64 = 1 << 10;

pub(crate) fn parse(config: &[u8]) -> Result<Value, ConvertError> {
    serde_json::from_slice(config).map_err(|error| ConvertError::Config {
        field: "the file".to_owned(),
        expected: "JSON".to_owned(),
        found: error.to_string(),
    })
}

/// The section about the text model: a multimodal configuration has it inside.
pub(crate) fn text(config: &Value) -> &Value {
    if config["text_config"].is_object() { &config["text_config"] } else { config }
}

pub(crate) fn number(section: &Value, key: &str, max: u64) -> Result<u64, ConvertError> {
    let least = u64::from(key != "first_k_dense_replace");
    section[key].as_u64().filter(|n| (least..=max).contains(n)).ok_or_else(|| {
        ConvertError::Config {
            field: key.to_owned(),
            expected: format!("a whole number from {least} to {max}"),
            found: section[key].to_string().chars().take(40).collect(),
        }
    })
}

/// Cuts a configuration to its first layers, of which at least one must have experts. Returns
/// `config.json`.
pub(crate) fn cut(config: &[u8], layers: u32) -> Result<Vec<u8>, ConvertError> {
    let mut root = parse(config)?;
    let present = number(text(&root), "num_hidden_layers", MAX_LAYERS)?;
    let dense = number(text(&root), "first_k_dense_replace", MAX_LAYERS)?;
    if u64::from(layers) > present || u64::from(layers) <= dense {
        return Err(ConvertError::Config {
            field: "num_hidden_layers".to_owned(),
            expected: format!("{} to {present} layers, so that one has experts", dense + 1),
            found: layers.to_string(),
        });
    }
    let text = if root["text_config"].is_object() { &mut root["text_config"] } else { &mut root };
    text["num_hidden_layers"] = layers.into();
    for list in ["full_attn_layers", "kda_layers"] {
        if let Some(list) = text["linear_attn_config"][list].as_array_mut() {
            // They count from one.
            list.retain(|layer| layer.as_u64().is_some_and(|layer| layer <= u64::from(layers)));
        }
    }
    let mut json = serde_json::to_vec_pretty(&root).expect("plain data serialises");
    json.push(b'\n');
    Ok(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_cut_to_layers_that_still_have_experts() {
        let config = crate::SynthModel::KimiK3.config();
        let five = parse(&cut(config, 5).unwrap()).unwrap();
        let text = &five["text_config"];
        assert_eq!(text["num_hidden_layers"], 5);
        assert_eq!(text["linear_attn_config"]["full_attn_layers"], serde_json::json!([4]));
        assert_eq!(text["linear_attn_config"]["kda_layers"], serde_json::json!([1, 2, 3, 5]));
        for layers in [0, 1, 94] {
            let error = cut(config, layers).unwrap_err().to_string();
            assert!(error.contains("2 to 93 layers"), "{error}");
        }
    }
}
