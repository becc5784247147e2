//! What an engine has to say beside its results. The library prints nothing itself.

use std::fmt;
use std::sync::Arc;

/// Where notices go: lines for people, of what is worth knowing although nothing has failed.
///
/// ```
/// use rill::{EngineOptions, Log};
///
/// let log = Log::to(|line| eprintln!("rill: {line}"));
/// let options = EngineOptions { log, ..EngineOptions::default() };
/// ```
#[derive(Clone, Default)]
pub struct Log(Option<Sink>);

type Sink = Arc<dyn Fn(&str) + Send + Sync>;

impl Log {
    /// Calls `sink` with every line, from whichever thread has something to say: it must be quick.
    pub fn to(sink: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(sink)))
    }

    pub(crate) fn say(&self, line: impl FnOnce() -> String) {
        if let Some(sink) = &self.0 {
            sink(&line());
        }
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Log(to somebody)" } else { "Log(to nobody)" })
    }
}
