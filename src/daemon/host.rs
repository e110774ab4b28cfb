//! The machine that a role runs on.

/// The host's name as the kernel has it, in lower case as node names are.
pub fn name() -> std::io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().to_lowercase())
}
