//! The engine against values that independent implementations computed.

mod common;

use common::{demo, k3_tiny, kimi_linear_tiny, reference};
use rill::reference::{Comparison, Errors, Feed, compare};
use rill::{Engine, EngineOptions, Folder};

fn measure(folder: Folder, feed: Feed) -> Comparison {
    let engine = Engine::open(folder.clone(), &EngineOptions::default()).expect("the model opens");
    let result = compare(&engine, &reference(&folder), feed).expect("the reference fits");
    println!("{}: {result:#?}", folder.describe(""));
    result
}

fn within(what: &str, errors: Errors, median: f64, worst: f64) {
    assert!(errors.median <= median, "{what}: median {:e} > {median:e}", errors.median);
    assert!(errors.worst <= worst, "{what}: worst {:e} > {worst:e}", errors.worst);
}

#[test]
fn k3_tiny_agrees_with_float64_running_freely() {
    let got = measure(k3_tiny(), Feed::Free);
    within("logits", got.logits, 3e-6, 1e-4);
    within("hidden", got.hidden, 3e-6, 1e-4);
    within("KDA state", got.kda_state.expect("the reference has it"), 3e-6, 1e-4);
    assert_eq!(got.arg_max_differences, 0);
    assert_eq!(got.routing_differences, (0, 8 * 40));
    assert!(got.worst_expert_weight <= 1e-5);
}

#[test]
fn k3_tiny_layers_agree_when_each_gets_the_expected_input() {
    let got = measure(k3_tiny(), Feed::ExpectedInputs);
    within("hidden", got.hidden, 3e-6, 3e-6);
    within("logits", got.logits, 3e-6, 3e-6);
    assert_eq!(got.routing_differences.0, 0);
}

#[test]
fn kimi_linear_tiny_agrees_with_the_published_implementation() {
    let got = measure(kimi_linear_tiny(), Feed::Free);
    within("logits", got.logits, 3e-6, 2e-5);
    within("hidden", got.hidden, 3e-6, 2e-5);
    assert_eq!(got.arg_max_differences, 0);
}

#[test]
fn k3_nano_agrees_with_float64() {
    let got = measure(demo(), Feed::Free);
    within("logits", got.logits, 1e-6, 5e-6);
    within("hidden", got.hidden, 1e-6, 5e-6);
    assert_eq!(got.routing_differences, (0, 12 * 151));
    assert_eq!(got.arg_max_differences, 0);
}
