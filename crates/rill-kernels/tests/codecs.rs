//! Packing plain weights: what the encoders promise.

use proptest::prelude::*;
use rill_kernels::{Codec, EncodeError, Matrix};

fn encode(codec: Codec, weights: &[f32]) -> Result<(Vec<u8>, Vec<u8>), EncodeError> {
    let layout = codec.layout(1, weights.len()).expect("the shape fits");
    let (mut codes, mut scales) = (vec![0; layout.codes], vec![0; layout.scales]);
    codec.encode_row(weights, &mut codes, &mut scales)?;
    Ok((codes, scales))
}

fn round_trip(codec: Codec, weights: &[f32]) -> Vec<f32> {
    let (codes, scales) = encode(codec, weights).expect("finite weights");
    let mut out = vec![0.0; weights.len()];
    let matrix = Matrix::new(codec, 1, weights.len(), &codes, &scales).expect("it fits");
    matrix.decode_row(0, &mut out);
    out
}

/// Numbers with the shape of weights: a sum of four uniforms.
fn bell(n: usize) -> Vec<f32> {
    let mut state = 7u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..n).map(|_| 0.03 * (uniform() + uniform() + uniform() + uniform())).collect()
}

fn relative_error(codec: Codec, weights: &[f32]) -> f64 {
    let decoded = round_trip(codec, weights);
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|e| e * e).sum::<f64>();
    let difference = weights.iter().zip(&decoded).map(|(a, b)| f64::from(a - b));
    let size = weights.iter().map(|&w| f64::from(w));
    (squares(&mut difference.into_iter()) / squares(&mut size.into_iter())).sqrt()
}

#[test]
fn f32_is_exact_and_bf16_rounds_to_nearest_even() {
    let weights = bell(100);
    assert_eq!(round_trip(Codec::F32, &weights), weights);
    for (w, b) in weights.iter().zip(round_trip(Codec::Bf16, &weights)) {
        assert!((w - b).abs() <= w.abs() / 256.0);
    }
    let half_way = [f32::from_bits(0x3f80_8000), f32::from_bits(0x3f81_8000)];
    let bits: Vec<u32> = round_trip(Codec::Bf16, &half_way).iter().map(|w| w.to_bits()).collect();
    assert_eq!(bits, [0x3f80_0000, 0x3f82_0000]);
}

#[test]
fn grouped_formats_have_the_expected_errors() {
    let weights = bell(4096);
    let q8 = relative_error(Codec::Q8 { group: 128 }, &weights);
    let q4 = relative_error(Codec::Q4 { group: 128 }, &weights);
    let q4_small = relative_error(Codec::Q4 { group: 32 }, &weights);
    println!("q8 {q8:.5}, q4 {q4:.5}, q4 in groups of 32 {q4_small:.5}");
    // One step of 2·max/254 resp. max/8 in a bell of these tails; see docs/quality.md.
    assert!(q8 < 0.007, "{q8}");
    assert!(q4 < 0.115, "{q4}");
    assert!(q4_small < q4);
}

#[test]
fn q8_follows_its_definition_by_hand() {
    // Largest 127 → scale 1; ties to even.
    let weights = [127.0, -127.0, 0.5, 1.5, 2.5, -0.5];
    let (codes, scales) = encode(Codec::Q8 { group: 32 }, &weights).unwrap();
    assert_eq!(scales, [0x00, 0x3c]);
    assert_eq!(codes.iter().map(|&c| c as i8).collect::<Vec<_>>(), [127, -127, 0, 2, 2, 0]);
}

#[test]
fn q4_gives_the_largest_weight_the_longer_side() {
    // −8 … 7 in steps of one is exact with scale 1, and mirrored with scale −1.
    let weights: Vec<f32> = (-8..8).map(|i| i as f32).collect();
    assert_eq!(round_trip(Codec::Q4 { group: 16 }, &weights), weights);
    let mirrored: Vec<f32> = weights.iter().map(|w| -w).collect();
    assert_eq!(round_trip(Codec::Q4 { group: 16 }, &mirrored), mirrored);
}

#[test]
fn zeros_stay_zero() {
    for codec in [Codec::Q8 { group: 32 }, Codec::Q4 { group: 32 }, Codec::Bf16] {
        assert_eq!(round_trip(codec, &[0.0; 45]), [0.0; 45]);
    }
}

#[test]
fn what_has_no_code_is_refused_by_place() {
    let at = |i: usize, w: f32| {
        let mut weights = vec![0.25; 40];
        weights[i] = w;
        weights
    };
    for codec in [Codec::F32, Codec::Bf16, Codec::Q8 { group: 32 }, Codec::Q4 { group: 32 }] {
        for w in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = encode(codec, &at(37, w)).unwrap_err();
            assert!(matches!(error, EncodeError::NotFinite { input: 37, .. }), "{error}");
        }
    }
    for codec in [Codec::Q8 { group: 32 }, Codec::Q4 { group: 32 }] {
        let error = encode(codec, &at(33, -1e30)).unwrap_err();
        assert!(error.to_string().contains("from 32 on reaches 1000"), "{error}");
    }
    let error = encode(Codec::Mxfp4, &[0.0; 32]).unwrap_err();
    assert_eq!(error, EncodeError::ReadOnly("mxfp4"));
}

proptest! {
    #[test]
    fn no_weight_is_further_off_than_half_a_step(
        weights in prop::collection::vec(-4.0f32..4.0, 1..200),
    ) {
        let largest = weights.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        let q8 = round_trip(Codec::Q8 { group: 256 }, &weights);
        // f16 scales are off by up to 2^-11, which 127 steps magnify.
        let step = largest / 127.0;
        for (w, q) in weights.iter().zip(q8) {
            prop_assert!((w - q).abs() <= step * (0.5 + 127.0 / 2048.0) + 1e-6);
        }
        let q4 = round_trip(Codec::Q4 { group: 256 }, &weights);
        for (w, q) in weights.iter().zip(q4) {
            prop_assert!((w - q).abs() <= largest / 6.0 * 1.6 + 1e-6);
        }
    }
}
