//! `rill plan`.

use std::ffi::OsString;

use serde_json::Value;

use crate::common::{args, file, repository, rill};

/// `rill plan` for a published configuration with a trunk of four bits.
fn config(name: &str, more: &[&str]) -> Vec<OsString> {
    let path = repository(&format!("fixtures/configs/{name}.json"));
    let mut all = args!["plan", "--config", path, "--trunk", "q4"];
    all.extend(more.iter().map(OsString::from));
    all
}

fn facts(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_published_configuration_is_planned_without_any_weights() {
    let text = rill(config("kimi-k3", &["--budget", "16G", "--threads", "8"])).done();
    for part in [
        "kimi-k3.json\n",
        "16.0 GB, as asked",
        "process baseline",
        "KDA state",
        "latent cache",
        "4096 tokens of context",
        "of 93 layers",
        "expert slots",
        "floor ",
        "working set          25.9 GB",
        "disk                 1.48 TB",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
}

#[test]
fn latents_as_halves_are_planned_with_half_the_memory() {
    let cache = |format: &str| {
        let plan = facts(&rill(config("kimi-k3", &["--latents", format, "--json"])).done());
        assert_eq!(plan["latents"], format);
        plan["shares"]["latent cache"].as_u64().unwrap()
    };
    // 512 + 64 values of 24 layers.
    assert_eq!(cache("f32"), 4 * 576 * 24 * 4096);
    for format in ["f16", "bf16"] {
        assert_eq!(2 * cache(format), cache("f32"));
        let text = rill(config("kimi-k3", &["--latents", format, "--budget", "16G"])).done();
        assert!(text.contains(&format!("4096 tokens of context, {format}\n")), "{text}");
    }
    let message = rill(config("kimi-k3", &["--latents", "q4"])).misused();
    assert!(message.contains("f32, f16, bf16"), "{message}");
}

#[test]
fn what_cannot_be_known_before_is_estimated_and_says_so() {
    let text = rill(config("kimi-k3", &["--experts", "mxfp4z", "--budget", "16G"])).done();
    assert!(text.contains("of 15.0 MB, estimated, "), "{text}");
    assert!(text.contains("the model's files, estimated"), "{text}");
    let plan = facts(&rill(config("kimi-k3", &["--experts", "mxfp4z", "--json"])).done());
    assert_eq!(plan["estimated"], true);
    // Sixteen experts of 92 layers.
    assert_eq!(plan["working_set_bytes"], 16 * 92 * plan["record_bytes"].as_u64().unwrap());
}

#[test]
fn json_has_every_line_and_the_floor() {
    let more = ["--budget", "16G", "--threads", "8", "--json"];
    let plan = facts(&rill(config("kimi-k3", &more)).done());
    assert_eq!(plan["fits"], true);
    assert_eq!(plan["budget_bytes"], 16_000_000_000u64);
    let floor = plan["floor_bytes"].as_u64().unwrap();
    assert!(floor < 4_000_000_000, "{floor}");
    let shares = plan["shares"].as_object().unwrap();
    assert_eq!(shares.len(), 11);
    let total: u64 = shares.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(plan["planned_bytes"], total);
    assert!((floor..=16_000_000_000).contains(&total));

    // The floor is a budget that works, and a byte less is not.
    let at = |budget: u64, more: &[&str]| {
        let budget = budget.to_string();
        let all = [&["--threads", "8", "--budget", &budget], more].concat();
        rill(config("kimi-k3", &all))
    };
    at(floor, &[]).done();
    let refused = at(floor - 1, &[]).failed();
    assert!(refused.contains(&floor.to_string()) && refused.contains("latent cache"), "{refused}");
    // For programs the plan is on standard output all the same.
    let refused = at(floor - 1, &["--json"]);
    assert_eq!((refused.code, &facts(refused.text())["fits"]), (Some(1), &Value::from(false)));
    assert_eq!(facts(refused.text())["floor_bytes"], floor);
}

#[test]
fn the_table_has_budgets_contexts_and_floors() {
    let text = rill(config("kimi-k3", &["--table", "--threads", "8"])).done();
    let rows: Vec<Vec<&str>> =
        text.lines().skip(2).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["context", "4K", "16K", "64K", "256K", "1M"]);
    assert_eq!(rows.len(), 10, "{text}");
    assert_eq!(rows[1][..2], ["4", "GB"]);
    // 4 GB hold a context of 4K tokens but not one of a million.
    assert_eq!((rows[1][3], rows[1].last()), ("GB", Some(&"-")), "{text}");
    assert_eq!((rows[8][0], rows[9][0]), ("floor", "recommended"));
}

#[test]
fn folders_of_every_kind_are_planned() {
    for path in ["fixtures/k3-tiny", "fixtures/kimi-linear-tiny", "fixtures/k3-tiny.waste"] {
        let text = rill(args!["plan", repository(path), "--ctx", "64", "--budget", "1Gi"]).done();
        assert!(text.contains("100.0 % of all") && text.contains("nothing is streamed"), "{text}");
    }
    let text = rill(["plan"]).done();
    assert!(text.starts_with("built-in k3-nano\n"), "{text}");
}

#[test]
fn a_run_needs_exactly_what_was_planned() {
    for more in [&[][..], &["--lookahead", "0"], &["--prefill-chunk", "1", "--threads", "7"]] {
        let all = [&["--ctx", "64"], more].concat();
        let plan = rill([&["plan", "--budget", "1Gi", "--json"], &all[..]].concat()).done();
        let floor = facts(&plan)["floor_bytes"].as_u64().unwrap();
        let run = |budget: u64| {
            let budget = budget.to_string();
            rill([&["run", "-n", "1", "--raw", "x", "--budget", &budget], &all[..]].concat())
        };
        run(floor).done();
        assert!(run(floor - 1).failed().contains(&floor.to_string()));
    }
}

#[test]
fn what_is_no_budget_and_no_configuration_is_refused() {
    for budget in ["8X", "-1", "", "1..5G", "G", "99999999999999999999T"] {
        let message = rill(["plan", &format!("--budget={budget}")]).misused();
        assert!(message.contains("--budget") || message.contains("such as 64M"), "{message}");
    }
    for wrong in [
        &["plan", "--trunk", "q4"][..],
        &["plan", "--ctx", "0"],
        &["plan", "--json", "--table"],
        &["plan", "folder", "--config", "file"],
    ] {
        rill(wrong).misused();
    }
    let beyond = rill(config("kimi-k3", &["--ctx", "1048577"])).failed();
    assert!(beyond.contains("1048577"), "{beyond}");
    let (_folder, path) = file("{}");
    let message = rill(args!["plan", "--config", &path]).failed();
    assert!(message.contains("text.txt") && message.contains("hidden_size"), "{message}");
    let missing = rill(args!["plan", "--config", path.with_extension("none")]).failed();
    assert!(missing.contains("text.none"), "{missing}");
}
