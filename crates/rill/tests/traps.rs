//! The places of the architecture that are silently wrong when misread. Each test changes
//! weights so that a right engine and a misreading one part company. `tools/traps.py` springs
//! the traps in the code instead and demands that the tests notice.
//!
//! The delta against the decayed state, nibble order and subnormal scales are pinned by position
//! and value in `rill-kernels/tests/bits.rs`, one-based layer lists in `tests/config.rs`.

mod common;

use common::{Copy, assert_same_bits, reference, repository};
use rill::{Engine, EngineOptions, Folder, Logits, Session};

const K3: &str = "fixtures/k3-tiny";

fn run(folder: Folder) -> (Vec<f32>, Session) {
    let ids = reference(&folder).input_ids;
    let engine = Engine::open(folder, &EngineOptions::default()).expect("the model opens");
    let mut session = engine.new_session();
    let logits = engine.forward(&mut session, &ids, Logits::All).expect("it runs");
    (logits, session)
}

fn original() -> (Vec<f32>, Session) {
    run(Folder::Disk(repository(K3)))
}

/// Runs k3-tiny with some of its tensors changed.
fn edited(which: impl Fn(&str) -> bool, edit: impl Fn(&mut [u8])) -> (Vec<f32>, Session) {
    let copy = Copy::of(&repository(K3));
    assert!(copy.edit(which, edit) > 0, "no tensor was changed");
    run(copy.folder())
}

/// Largest difference relative to the largest value.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    let largest = a.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let difference = a.iter().zip(b).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    difference / largest
}

fn write_f32(bytes: &mut [u8], index: usize, value: f32) {
    bytes[4 * index..4 * index + 4].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn a_log_beyond_the_heads_is_padding() {
    // k3-tiny has 3 heads and 32 values: reading A_log per channel would see the change.
    let (logits, _) = edited(
        |name| name.ends_with("A_log"),
        |bytes| {
            (3..32).for_each(|i| write_f32(bytes, i, 1.5));
        },
    );
    assert_same_bits("padding of A_log", &logits, &original().0);
}

#[test]
fn a_log_is_per_head() {
    let (_, session) = edited(
        |name| name.ends_with("layers.0.self_attn.A_log"),
        |bytes| write_f32(bytes, 1, -3.0),
    );
    let head = 32 * 32;
    let state = session.kda_state(0).unwrap();
    let before = original().1;
    let before = before.kda_state(0).unwrap();
    assert_same_bits("head 0", &state[..head], &before[..head]);
    assert_same_bits("head 2", &state[2 * head..], &before[2 * head..]);
    let changed = state[head..2 * head].iter().zip(&before[head..2 * head]);
    assert!(changed.filter(|(a, b)| a != b).count() > head / 2, "head 1 did not change");
}

#[test]
fn unrotated_rope_slots_count() {
    // The last 8 rows of kv_a_proj make the shared key part; hidden 96, bf16.
    let (logits, _) = edited(
        |name| name.ends_with("kv_a_proj_with_mqa.weight"),
        |bytes| {
            let rows = bytes.len() - 8 * 96 * 2;
            bytes[rows..].fill(0);
        },
    );
    assert!(distance(&original().0, &logits) > 1e-3);
}

#[test]
fn the_bias_chooses_experts_but_does_not_weigh_them() {
    // The same amount for every expert changes no choice, so it must change nothing at all.
    let (logits, _) = edited(
        |name| name.ends_with("e_score_correction_bias"),
        |bytes| {
            for b in bytes.chunks_exact_mut(4) {
                let bias = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                b.copy_from_slice(&(bias + 0.25).to_le_bytes());
            }
        },
    );
    assert_same_bits("biased by a constant", &logits, &original().0);
    // And a large one for a single expert must change the choice.
    let (logits, _) = edited(
        |name| name.ends_with("e_score_correction_bias"),
        |bytes| write_f32(bytes, 5, 100.0),
    );
    assert!(distance(&original().0, &logits) > 1e-3);
}

#[test]
fn each_site_of_a_layer_has_its_own_residual_mix() {
    let (original, _) = original();
    for site in
        ["self_attention_res_proj.weight", "mlp_res_proj.weight", "output_attn_res_proj.weight"]
    {
        let (logits, _) = edited(|name| name.ends_with(site), |bytes| bytes.fill(0));
        assert!(distance(&original, &logits) > 1e-3, "{site} has no effect");
    }
}

#[test]
fn nibble_order_matters_to_the_fixture() {
    let (logits, _) = edited(
        |name| name.ends_with("weight_packed"),
        |bytes| {
            bytes.iter_mut().for_each(|b| *b = b.rotate_left(4));
        },
    );
    assert!(distance(&original().0, &logits) > 1e-3);
}

#[test]
fn the_short_convolution_remembers_across_calls() {
    // Three calls against one, where only the convolution reaches back: a model whose state
    // decays to nothing at once would otherwise hide it.
    let engine = Engine::open(Folder::Disk(repository(K3)), &EngineOptions::default()).unwrap();
    let ids = &reference(&Folder::Disk(repository(K3))).input_ids[..3];
    let whole = engine.forward(&mut engine.new_session(), ids, Logits::Last).unwrap();
    let mut session = engine.new_session();
    let mut stepwise = Vec::new();
    for id in ids {
        stepwise = engine.forward(&mut session, &[*id], Logits::Last).unwrap();
    }
    assert_same_bits("stepwise", &stepwise, &whole);
    // The taps of the past have an effect at all.
    let (logits, _) = edited(
        |name| name.ends_with("k_conv1d.weight"),
        |bytes| {
            for taps in bytes.chunks_exact_mut(16) {
                taps[..12].fill(0);
            }
        },
    );
    assert!(distance(&original().0, &logits) > 1e-3);
}
