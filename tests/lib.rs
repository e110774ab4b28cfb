//! Help that the end-to-end tests share.

use anyhow::{Result, ensure};

/// Fails, showing the whole text, unless `part` is in it.
pub fn contains(text: &str, part: &str) -> Result<()> {
    ensure!(text.contains(part), "{part:?} is not in:\n{text}");
    Ok(())
}
