//! The memory plan: every budget from the floor up is divided within itself, and more memory
//! never means more reads.

mod common;

use proptest::prelude::*;
use rill::plan::{Plan, PlanOptions, Recode, Sizes};
use rill::{Error, Folder};
use rill_convert::{ExpertCodec, Synth, SynthFormat, SynthModel, SynthOptions, TrunkCodec};
use rill_format::container::Container;

fn of_config(model: SynthModel, experts: Recode, trunk: Recode) -> Sizes {
    let sizes = Sizes::of_config(model.config(), "config.json".to_owned(), experts, trunk);
    sizes.expect("published configurations can be planned")
}

fn options(budget_bytes: u64, context: usize) -> PlanOptions {
    PlanOptions { budget_bytes, context, threads: 8, ..Default::default() }
}

fn floor(sizes: &Sizes, options: PlanOptions) -> u64 {
    match Plan::new(sizes, PlanOptions { budget_bytes: 0, ..options }) {
        Err(Error::BelowFloor { plan }) => plan.floor_bytes,
        other => panic!("a budget of nothing gave {other:?}"),
    }
}

#[test]
fn the_floor_of_published_kimi_k3_is_below_4_gb_at_4096_tokens() {
    let sizes = of_config(SynthModel::KimiK3, Recode::Source, Recode::Q4);
    let floor = floor(&sizes, options(0, 4096));
    assert!(floor < 4_000_000_000, "{floor}");
    // And not by leaving something out: state, cache, one token's logits and one layer's experts
    // alone take more than 1.4 GB.
    assert!(floor > 1_400_000_000, "{floor}");
}

#[test]
fn sizes_from_a_configuration_are_those_of_the_container_made_from_it() {
    let codecs = [
        (Recode::Source, ExpertCodec::Source, TrunkCodec::Source),
        (Recode::Q8, ExpertCodec::Q8, TrunkCodec::Q8),
        (Recode::Q4, ExpertCodec::Q4, TrunkCodec::Q4),
    ];
    for model in SynthModel::ALL {
        for (recode, experts, trunk) in codecs {
            let sizes = of_config(model, recode, recode);
            let format = SynthFormat::Rill;
            let options = SynthOptions { format, experts, trunk, ..Default::default() };
            let synth = Synth::new(model.config(), &options).unwrap();
            assert_eq!(sizes.record_bytes, synth.record_bytes(), "{model:?} {recode:?}");
            assert_eq!(sizes.n_records(), synth.n_experts());
            // Vectors are counted as f32, some are stored as bf16; small files are left out.
            let (planned, made) = (sizes.disk_bytes as f64, synth.container_bytes() as f64);
            assert!((planned / made - 1.0).abs() < 0.001, "{model:?} {recode:?}: {planned} {made}");
            let experts = sizes.n_records() * sizes.record_bytes;
            let (planned, made) = (planned - experts as f64, synth.trunk_bytes() as f64);
            assert!((planned / made - 1.0).abs() < 0.004, "{model:?} {recode:?}: {planned} {made}");
        }
    }
}

#[test]
fn entropy_coded_experts_are_estimated_from_a_configuration_and_averaged_in_a_container() {
    // 3.62 bits of 33,030,144 weights, 128 bytes and up to 16 KiB.
    let sizes = of_config(SynthModel::KimiK3, Recode::Mxfp4z, Recode::Q4);
    assert!(sizes.estimated && sizes.mean_record_bytes == sizes.record_bytes);
    assert!((14_946_268..14_963_000).contains(&sizes.record_bytes), "{}", sizes.record_bytes);
    let plan = Plan::new(&sizes, options(16_000_000_000, 4096)).unwrap();
    assert!(plan.to_string().contains("MB, estimated, "), "{plan}");
    // Nothing becomes mxfp4z that is not mxfp4.
    let linear = of_config(SynthModel::KimiLinear48b, Recode::Mxfp4z, Recode::Q4);
    assert_eq!(linear, of_config(SynthModel::KimiLinear48b, Recode::Source, Recode::Q4));

    // A container of records that differ: slots are as large as the largest, reads as the mean.
    let uneven = tempfile::tempdir().unwrap();
    rill_testkit::write_uneven_experts(uneven.path(), &common::repository("fixtures/k3-tiny"), 2)
        .unwrap();
    let path = uneven.path().to_str().unwrap();
    let out = common::convert(path, ExpertCodec::Mxfp4z, TrunkCodec::Source);
    let sizes = Sizes::of_folder(Folder::Disk(out.path().to_owned())).unwrap();
    let container = Container::open(out.path().to_owned()).unwrap();
    let banks: u64 = container.bank_list().iter().flat_map(|bank| bank.file_bytes()).sum();
    assert_eq!(sizes.mean_record_bytes, banks.div_ceil(sizes.n_records()));
    assert!(!sizes.estimated && sizes.mean_record_bytes < sizes.record_bytes, "{sizes:?}");
    let plan = Plan::new(&sizes, options(floor(&sizes, options(0, 16)), 16)).unwrap();
    assert_eq!(plan.shares.slots, plan.expert_slots * sizes.record_bytes);
    let uses = (sizes.moe_layers * sizes.top_k) as u64;
    assert_eq!(plan.working_set_bytes, uses * sizes.mean_record_bytes);
    assert!(plan.expert_read_bytes <= plan.working_set_bytes);
    assert!(plan.to_string().contains("the largest expert"), "{plan}");
}

#[test]
fn sizes_of_a_container_hold_what_its_checkpoint_binds() {
    for folder in [common::k3_tiny(), common::kimi_linear_tiny(), common::demo()] {
        let about = rill::describe(folder.clone()).unwrap();
        let published = Sizes::of_folder(folder.clone()).unwrap();
        let Folder::Disk(path) = &folder else { panic!("the fixtures are on disk") };
        let out = tempfile::tempdir().unwrap();
        let checkpoint = rill::Checkpoint::open(folder.clone()).unwrap();
        let plan =
            rill_convert::Plan::new(&checkpoint, ExpertCodec::Source, TrunkCodec::Source).unwrap();
        let control =
            rill_convert::Control { jobs: 1, progress: &|_| std::ops::ControlFlow::Continue(()) };
        rill_convert::convert(&checkpoint, &plan, out.path(), &control).unwrap();
        let container = Sizes::of_folder(Folder::Disk(out.path().to_owned())).unwrap();
        assert_eq!(container.record_bytes, plan.record_bytes());
        assert_eq!(container.vector_bytes, published.vector_bytes);
        assert_eq!(container.head_bytes, published.head_bytes);
        for sizes in [published, container] {
            let held =
                sizes.layer_bytes.iter().sum::<u64>() + sizes.head_bytes + sizes.vector_bytes;
            let trunk = about.summary.trunk_bytes;
            assert!(held >= trunk, "{}: {held} of {trunk}", path.display());
            // Whole blocks make much of a tiny model; nothing else may.
            let blocks = 16 * 8192 * (sizes.layer_bytes.len() + 1) as u64;
            assert!(held < trunk + sizes.vector_bytes + blocks, "{}: {held}", path.display());
            assert_eq!(sizes.session_bytes, about.summary.session_bytes);
            assert!(sizes.disk_bytes >= about.payload_bytes);
        }
    }
}

#[test]
fn a_container_of_the_other_format_can_be_planned() {
    let sizes = Sizes::of_folder(Folder::Disk(common::repository("fixtures/k3-tiny.waste")));
    let sizes = sizes.unwrap();
    let floor = floor(&sizes, options(0, 16));
    let plan = Plan::new(&sizes, options(floor, 16)).unwrap();
    assert!(plan.shares.slots >= sizes.record_bytes * sizes.top_k as u64);
}

#[test]
fn a_refusal_shows_the_plan_and_the_floor() {
    let sizes = of_config(SynthModel::KimiK3, Recode::Source, Recode::Q4);
    let refused = Plan::new(&sizes, options(1_000_000_000, 4096)).unwrap_err().to_string();
    let floor = floor(&sizes, options(0, 4096));
    for part in ["1000000000 bytes", &floor.to_string(), "KDA state", "expert slots", "raise the"] {
        assert!(refused.contains(part), "{part} not in {refused}");
    }
}

#[test]
fn a_context_beyond_the_model_is_refused() {
    let sizes = of_config(SynthModel::KimiLinear48b, Recode::Q4, Recode::Q4);
    let error = Plan::new(&sizes, options(u64::MAX, sizes.max_context + 1)).unwrap_err();
    assert!(matches!(error, Error::ContextFull { .. }), "{error}");
    assert!(Plan::new(&sizes, options(u64::MAX, sizes.max_context)).is_ok());
}

#[test]
fn with_room_for_everything_nothing_is_read_and_nothing_streamed() {
    for model in SynthModel::ALL {
        let sizes = of_config(model, Recode::Source, Recode::Q4);
        let plan = Plan::new(&sizes, options(u64::MAX, 4096)).unwrap();
        assert_eq!((plan.bytes_per_token(), plan.ring_slot_bytes), (0, 0));
        assert!(plan.pinned.iter().all(|pinned| *pinned) && plan.head_resident);
        assert_eq!(plan.expert_slots, sizes.n_records());
        assert_eq!(plan.prefill_chunk, 64);
    }
}

#[test]
fn the_largest_numbers_a_configuration_may_have_are_no_trouble() {
    let mut tree: serde_json::Value = serde_json::from_slice(SynthModel::KimiK3.config()).unwrap();
    let text = &mut tree["text_config"];
    for (key, value) in [
        ("hidden_size", 1u64 << 17),
        ("vocab_size", 1 << 21),
        ("intermediate_size", 1 << 20),
        ("moe_intermediate_size", 1 << 20),
        ("num_experts", 1 << 16),
        ("num_experts_per_token", 1 << 16),
        ("num_shared_experts", 1),
        ("routed_expert_hidden_size", 1 << 17),
        ("num_attention_heads", 1 << 8),
        ("num_key_value_heads", 1 << 8),
        ("kv_lora_rank", 1 << 17),
        ("max_position_embeddings", 1 << 30),
    ] {
        text[key] = value.into();
    }
    for recode in [Recode::Source, Recode::Q8, Recode::Q4] {
        let json = tree.to_string();
        let sizes = Sizes::of_config(json.as_bytes(), String::new(), recode, recode).unwrap();
        // All the experts of all tokens are 2^60 bytes and more.
        assert!(sizes.working_set_bytes() > 1 << 60);
        let most = PlanOptions {
            context: 1 << 30,
            latents: rill::LatentFormat::F32,
            sessions: usize::MAX,
            threads: usize::MAX,
            lookahead: 0,
            prefill_chunk: usize::MAX,
            budget_bytes: u64::MAX - 1,
            logits: 40,
            snapshot_bytes: u64::MAX,
        };
        assert!(matches!(Plan::new(&sizes, most), Err(Error::BelowFloor { .. })));
        let plan = Plan::new(&sizes, options(1 << 40, 1)).map(|plan| plan.floor_bytes);
        assert!(matches!(plan, Err(Error::BelowFloor { .. })), "{plan:?}");
    }
}

/// Pinning all layers takes less than pinning all but the last and a ring for that one.
#[test]
fn a_ring_is_given_up_when_pinning_everything_takes_less() {
    let mut sizes = of_config(SynthModel::KimiLinear48b, Recode::Q4, Recode::Q4);
    sizes.layer_bytes = vec![1 << 30];
    sizes.head_bytes = 1 << 20;
    let plan = Plan::new(&sizes, options(floor(&sizes, options(0, 64)), 64)).unwrap();
    assert_eq!(plan.pinned, [true]);
    // The head is small enough to be held too, which takes half of a ring for it.
    assert!(plan.head_resident);
    assert_eq!((plan.ring_slot_bytes, plan.trunk_read_bytes), (0, 0));
}

#[test]
fn the_trunk_comes_before_the_experts() {
    for (model, experts) in
        [(SynthModel::KimiK3, Recode::Source), (SynthModel::KimiLinear48b, Recode::Source)]
    {
        let sizes = of_config(model, experts, Recode::Q4);
        let smallest = *sizes.layer_bytes.iter().min().unwrap();
        let floor = floor(&sizes, options(0, 4096));
        for step in 1..200 {
            let plan = Plan::new(&sizes, options(floor + step * (floor / 7), 4096)).unwrap();
            let spare = plan.expert_slots.saturating_sub(sizes.top_k as u64) * sizes.record_bytes;
            assert!(
                plan.trunk_read_bytes == 0 || spare <= smallest + sizes.head_bytes,
                "{model:?}: {spare} bytes of spare slots while the trunk is streamed\n{plan}"
            );
        }
    }
}

#[test]
fn the_recommended_budget_holds_the_trunk_and_one_tokens_experts() {
    for model in SynthModel::ALL {
        let sizes = of_config(model, Recode::Source, Recode::Q4);
        for prefill_chunk in [64, 4096] {
            let at = |budget| PlanOptions { prefill_chunk, ..options(budget, 4096) };
            let least = Plan::new(&sizes, at(floor(&sizes, at(0)))).unwrap();
            let holds = |budget| {
                let plan = Plan::new(&sizes, at(budget)).unwrap();
                plan.trunk_read_bytes == 0 && plan.shares.slots >= plan.working_set_bytes
            };
            assert!(holds(least.recommended_bytes), "{least}");
            assert!(!holds(least.recommended_bytes - sizes.record_bytes), "{least}");
        }
    }
}

/// Sizes of models that never were.
fn any_sizes() -> impl Strategy<Value = Sizes> {
    let trunk = (
        prop::collection::vec(1..5_000_000u64, 1..12),
        0..100_000u64,
        1..20_000_000u64,
        1..50_000u64,
    );
    let experts = (1..1_000_000u64, 0..1_000_000u64, 1..12usize, 1..64usize, 1..8usize);
    let session = (0..10_000_000u64, 0..5_000u64, 1..200_000u64, 0..500_000u64);
    (trunk, experts, session).prop_map(
        |(
            (layer_bytes, vector_bytes, head_bytes, row),
            (record, mean, moe_layers, n, k),
            session,
        )| {
            Sizes {
                layer_bytes,
                vector_bytes,
                head_bytes,
                head_row_bytes: row.min(head_bytes),
                record_bytes: record,
                mean_record_bytes: mean.clamp(1, record),
                estimated: false,
                moe_layers,
                n_experts: n.max(k),
                top_k: k,
                session_bytes: session.0,
                cache_values_per_token: session.1,
                scratch_bytes_per_token: session.2,
                logits_bytes: session.3,
                index_bytes: 0,
                disk_bytes: 1 << 30,
                max_context: 1 << 20,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_budget_from_the_floor_up_is_kept(
        sizes in any_sizes(),
        above in prop::collection::vec(0..400_000_000u64, 1..20),
        context in 1..5000usize,
        lookahead in 0..5usize,
    ) {
        let asked = PlanOptions { lookahead, ..options(0, context) };
        let floor = floor(&sizes, asked);
        let below = Plan::new(&sizes, PlanOptions { budget_bytes: floor - 1, ..asked });
        let refused = matches!(below, Err(Error::BelowFloor { .. }));
        prop_assert!(refused, "a byte below the floor");
        let mut budgets: Vec<u64> = above.iter().map(|above| floor + above).collect();
        budgets.push(floor);
        budgets.sort_unstable();
        let mut last_read = u64::MAX;
        for budget_bytes in budgets {
            let plan = Plan::new(&sizes, PlanOptions { budget_bytes, ..asked }).unwrap();
            prop_assert!(plan.shares.total() <= budget_bytes, "{plan}");
            prop_assert_eq!(plan.floor_bytes, floor);
            prop_assert!(plan.bytes_per_token() <= last_read, "more memory reads more:\n{}", plan);
            last_read = plan.bytes_per_token();
            prop_assert!(plan.expert_slots >= (sizes.top_k + lookahead) as u64);
            prop_assert!((1..=64).contains(&plan.prefill_chunk));
            // What is streamed fits a slot of the ring.
            for (&bytes, &pinned) in sizes.layer_bytes.iter().zip(&plan.pinned) {
                prop_assert!(pinned || bytes <= plan.ring_slot_bytes);
            }
            prop_assert_eq!(plan.shares.ring, 2 * plan.ring_slot_bytes);
            prop_assert!(plan.head_resident || plan.ring_slot_bytes > 0);
        }
        let unbounded = Plan::new(&sizes, PlanOptions { budget_bytes: u64::MAX, ..asked });
        prop_assert!(unbounded.is_ok());
    }
}
