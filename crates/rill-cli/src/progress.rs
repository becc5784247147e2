//! How far a long prompt has come, on a terminal, and its end when that is asked for.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rill::config::ModelConfig;
use rill::{LayerIdx, Observer};

use crate::output::status;

/// Shorter prompts need no progress.
const PATIENCE: Duration = Duration::from_secs(1);

/// Shows which layer a piece of a prompt is in, and ends its step once the flag is set.
pub(crate) struct Progress {
    cancel: Arc<AtomicBool>,
    /// Nobody watches a file or a pipe.
    terminal: bool,
    start: Instant,
    n_layers: usize,
    hidden_size: usize,
    /// Tokens of whole pieces.
    done: usize,
}

impl Progress {
    pub(crate) fn new(config: &ModelConfig, quiet: bool, cancel: Arc<AtomicBool>) -> Self {
        Self {
            cancel,
            terminal: !quiet && io::stderr().is_terminal(),
            start: Instant::now(),
            n_layers: config.layers.len(),
            hidden_size: config.hidden_size,
            done: 0,
        }
    }
}

impl Observer for Progress {
    fn after_layer(&mut self, layer: LayerIdx, hidden: &mut [f32]) -> ControlFlow<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        let n = hidden.len() / self.hidden_size;
        let last = layer.0 + 1 == self.n_layers;
        if self.terminal && n > 1 && self.start.elapsed() > PATIENCE {
            let tokens = self.done + n;
            match last {
                // The line is for the answer.
                true => status("\r\x1b[K"),
                false => {
                    let layer = layer.0 + 1;
                    status(&format!("\rlayer {layer} of {}, {tokens} tokens\x1b[K", self.n_layers));
                }
            }
        }
        if last {
            self.done += n;
        }
        ControlFlow::Continue(())
    }
}
