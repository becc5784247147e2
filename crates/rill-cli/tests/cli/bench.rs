//! `rill bench`.

use serde_json::Value;

use crate::common::{args, repository, rill};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn decoding_and_prompts_are_measured_apart() {
    let shown = json(&rill(["bench", "decode", "--tokens", "5", "--prompt", "9", "--json"]).done());
    let counters = &shown["counters"];
    assert_eq!(counters["decode"]["tokens"], 5);
    assert_eq!(counters["prefill"]["tokens"], 0, "the prompt is not measured");
    let shown = json(&rill(["bench", "prefill", "--prompt", "40", "--json"]).done());
    assert_eq!(shown["counters"]["prefill"]["tokens"], 40);
    assert_eq!(shown["forced_routing"], false);
    let text = rill(["bench", "decode", "--tokens", "3", "--prompt", "0"]).done();
    for part in ["3 tokens in", "tokens/s", "MB/token", "GB/s", "% resident", "% of the time"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn recorded_routing_decides_what_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.safetensors");
    rill(args!["trace", "record", "--out", &path, "-n", "0", "Call"]).done();
    let replayed = json(&rill(args!["trace", "replay", &path, "--json"]).done());
    let n_recorded = replayed["n_tokens"].as_u64().unwrap();
    let distinct = replayed["replays"][0]["distinct"].as_u64().unwrap();

    // All experts fit, so each of the recorded ones is read once, however often it comes again.
    let base = args!["bench", "decode", "--tokens", "20", "--prompt", "0", "--json"];
    let mut forced = base.clone();
    forced.extend(args!["--routing", &path]);
    let shown = json(&rill(&forced).done());
    assert_eq!(shown["forced_routing"], true);
    let experts = &shown["counters"]["experts"];
    assert_eq!(experts["demanded"], distinct);
    assert_eq!(
        experts["wanted"],
        replayed["replays"][0]["uses"].as_u64().unwrap() * 20 / n_recorded
    );
    assert_eq!(experts["ahead"], 0, "nothing is read ahead of recorded routing");
    let free = json(&rill(&base).done());
    let demanded = free["counters"]["experts"]["demanded"].as_u64().unwrap();
    let ahead = free["counters"]["experts"]["ahead"].as_u64().unwrap();
    assert!(demanded + ahead > distinct, "20 tokens of its own use more than {distinct}");
}

#[test]
fn routing_of_another_model_is_refused() {
    let other = repository("crates/rill-stream/tests/data/kimi_linear_300_tokens.safetensors");
    let error = rill(args!["bench", "decode", "--routing", other]).failed();
    assert!(error.contains("number of experts should be"), "{error}");
    let missing = repository("no.safetensors");
    assert!(
        rill(args!["bench", "prefill", "--routing", missing]).failed().contains("no.safetensors")
    );
}

#[test]
fn products_are_checked_and_measured_beside_what_the_machine_can_do() {
    let quick = [
        "bench",
        "kernels",
        "--seconds",
        "0.2",
        "--budget",
        "8M",
        "--threads",
        "2",
        "--context",
        "64",
    ];
    let shown = json(&rill(quick.iter().chain(&["--json", "--shape", "kimi-linear"])).done());
    assert_eq!(shown["walked_bytes"], 8_000_000);
    assert_eq!(shown["machine"][1]["threads"], 2);
    let results = shown["results"].as_array().unwrap();
    // Formats, shapes, numbers of vectors; one thread, two threads, a core's own cache.
    assert_eq!(results.len(), 11 * 5 * 4 * 3);
    assert_eq!((&results[0]["rows"], &results[0]["cols"]), (&1024.into(), &2304.into()));
    for result in results {
        assert_eq!(result["isa"], shown["kernels"]);
        for key in ["gweights_per_s", "gb_per_s", "share_of_fma_peak"] {
            assert!(result[key].as_f64().unwrap() > 0.0, "{key} of {result}");
        }
        let share = &result["share_of_bandwidth"];
        assert_eq!(share.is_null(), result["from"] == "cache", "{result}");
    }
    for step in shown["token"].as_array().unwrap() {
        let seconds = |key: &str| step[key].as_f64().unwrap();
        let parts = ["experts_seconds", "trunk_seconds", "head_seconds"].map(seconds);
        let sum: f64 = parts.iter().sum();
        assert!((seconds("products_seconds") - sum).abs() < 1e-9 * sum, "{step}");
        // Kimi-Linear's eight experts of 26 layers, which containers have in q4: 4.125 bits.
        let formats = step["formats"].as_array().unwrap();
        assert_eq!(formats.len(), 11);
        let of = |codec: &str| formats.iter().find(|f| f["codec"] == codec).unwrap();
        assert_eq!(of("q4")["products_seconds"], step["products_seconds"]);
        let weights = 26.0 * 8.0 * 3.0 * 1024.0 * 2304.0;
        for (codec, bits) in [("q4", 4.125), ("trellis", 3.15), ("mxfp4z", 3.64)] {
            let found = 8.0 * of(codec)["bytes"].as_f64().unwrap() / weights;
            assert!((found - bits).abs() < 0.05, "{codec}: {found}");
        }
    }
    // What is not a product is measured on one thread: twenty KDA layers with 32 heads, seven of MLA.
    let rest = shown["rest"].as_array().unwrap();
    let calls = |name: &str| &rest.iter().find(|r| r["kernel"] == name).unwrap()["calls"];
    assert_eq!((calls("kda_step"), calls("attend, some heads")), (&640.into(), &7.into()));
    let sum: f64 = rest.iter().map(|r| r["seconds"].as_f64().unwrap()).sum();
    let token = &shown["token"][0];
    assert!((token["rest_seconds"].as_f64().unwrap() - sum).abs() < 1e-9 * sum, "{token}");
    let share = sum / (sum + token["products_seconds"].as_f64().unwrap());
    assert!((token["share_of_rest"].as_f64().unwrap() - share).abs() < 1e-9, "{token}");
    assert!(shown["token"][1]["rest_seconds"].is_null());
    let text = rill(quick).done();
    for part in [
        "1 thread read",
        "2 threads read",
        "GB/s",
        "mxfp4",
        "vq4p",
        "mxfp4z",
        "trellis-rotated",
        "expert down",
        "48.6 G weights of experts",
        "Besides products, at 64 positions",
        "mix: softmax",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let error = rill(["bench", "kernels", "--kernels", "abacus"]).misused();
    assert!(error.contains("\"abacus\"") && error.contains("scalar"), "{error}");
    for seconds in ["0", "-1", "nan", "86401", "long"] {
        let error = rill(["bench", "kernels", &format!("--seconds={seconds}")]).misused();
        assert!(error.contains("'--seconds <S>'"), "{error}");
    }
}

#[test]
fn sessions_that_write_at_once_are_measured_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.safetensors");
    rill(args!["trace", "record", "--out", &path, "-n", "20", "Call"]).done();
    let base =
        args!["bench", "serve", "--sessions", "1,3", "--tokens", "12", "--warm", "3", "--json"];
    let mut forced = base.clone();
    forced.extend(args!["--routing", &path]);
    let shown = json(&rill(&forced).done());
    assert_eq!(shown["forced_routing"], true);
    let results = shown["results"].as_array().unwrap();
    let numbers: Vec<&Value> = results.iter().map(|result| &result["sessions"]).collect();
    assert_eq!(numbers, [1, 3]);
    for (result, sessions) in results.iter().zip([1, 3]) {
        // From the step in which the last is warm to that in which the first ends.
        let tokens = result["counters"]["decode"]["tokens"].as_u64().unwrap();
        assert!((10 * sessions..=12 * sessions).contains(&tokens), "{tokens} of {sessions}");
        assert_eq!(tokens % sessions, 0, "all are in every step");
    }
    // Strangers choose other experts: three want more than one, and fewer than three times as many.
    let wanted = |i: usize| {
        let counters = &results[i]["counters"];
        let tokens = counters["decode"]["tokens"].as_f64().unwrap();
        counters["experts"]["wanted"].as_f64().unwrap() / tokens
    };
    assert!(wanted(1) < wanted(0), "{} and {}", wanted(1), wanted(0));
    assert!(wanted(1) > wanted(0) / 3.0);
    let text = rill(["bench", "serve", "--sessions", "2", "--tokens", "8"]).done();
    for part in ["sessions", "tokens/s", "MB/token", "waiting"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}
