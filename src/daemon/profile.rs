//! CPU and heap profiles in pprof's format (gzipped protobuf, symbols inside), as `go tool pprof` reads them.

use std::io::{Read, Write};
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use pprof::ProfilerGuardBuilder;
use pprof::protos::{Message, Profile};
use tokio::sync::Semaphore;

/// Samples a second: upstream's (Go's) rate, off by one so as not to beat in time with timers.
pub const DEFAULT_HZ: i32 = 99;
/// The longest profile that is taken, in seconds.
pub const MAX_SECONDS: u64 = 600;

/// Frames of the allocator: pprof leaves them out, with all that they call, so that a profile names who allocates.
const ALLOCATOR_FRAMES: &str = r"<?alloc::(alloc|raw_vec)::.*|.*GlobalAlloc>?::.*|.*__rust_(alloc|alloc_zeroed|realloc)|_?_?rjem_.*|malloc|calloc|realloc|mallocx|rallocx|posix_memalign|aligned_alloc|prof_.*";

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("a CPU profile is being taken already: one at a time, try again when it ends")]
    Busy,
    #[error("cannot take a CPU profile: {0}")]
    Cpu(#[from] pprof::Error),
    #[error("heap profiling is off: start the process with _RJEM_MALLOC_CONF=prof:true,prof_active:true,lg_prof_sample:19")]
    HeapOff,
    #[error("cannot take a heap profile: {0}")]
    Heap(String),
    #[error("cannot encode the profile: {0}")]
    Encode(#[from] std::io::Error),
    #[error("the profile's task ended early: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// One profiler per process: the timer and the signal are process-wide.
static ONE: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(1));

/// Samples every thread's stack for `duration`. Dropping the future ends the profile.
pub async fn cpu(duration: Duration, hz: i32) -> Result<Bytes, ProfileError> {
    let _one = ONE.try_acquire().map_err(|_| ProfileError::Busy)?;
    let guard = ProfilerGuardBuilder::default().frequency(hz).build()?;
    tokio::time::sleep(duration).await;
    // Symbols are read from the binary's debug information: far too long for an async thread.
    tokio::task::spawn_blocking(move || {
        let profile = guard.report().build()?.pprof()?;
        backtrace::clear_symbol_cache();
        encode(&profile)
    })
    .await?
}

fn encode(profile: &Profile) -> Result<Bytes, ProfileError> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(&profile.encode_to_vec())?;
    Ok(Bytes::from(gzip.finish()?))
}

/// What is allocated now, by the stack that allocated it, sampled by jemalloc.
pub async fn heap() -> Result<Bytes, ProfileError> {
    let control = jemalloc_pprof::PROF_CTL.as_ref().ok_or(ProfileError::HeapOff)?;
    let mut control = std::sync::Arc::clone(control).lock_owned().await;
    if !control.activated() {
        return Err(ProfileError::HeapOff);
    }
    tokio::task::spawn_blocking(move || {
        let dumped = control.dump_pprof().map_err(|error| ProfileError::Heap(format!("{error:#}")))?;
        // The symbols of a whole binary would stay in memory, many times what a role needs.
        backtrace::clear_symbol_cache();
        let mut raw = Vec::new();
        GzDecoder::new(&dumped[..]).read_to_end(&mut raw)?;
        let mut profile =
            Profile::decode(&raw[..]).map_err(|error| ProfileError::Heap(format!("jemalloc's profile: {error}")))?;
        profile.drop_frames = i64::try_from(profile.string_table.len()).unwrap_or(0);
        profile.string_table.push(ALLOCATOR_FRAMES.to_owned());
        encode(&profile)
    })
    .await?
}

/// The function at an address of this process, as `/debug/pprof/symbol` tells it.
pub fn symbol(address: usize) -> Option<String> {
    let mut name = None;
    // `resolve` takes return addresses and looks one byte before; we are given addresses of instructions.
    let after = std::ptr::without_provenance_mut(address.saturating_add(1));
    backtrace::resolve(after, |found| {
        if name.is_none() {
            name = found.name().map(|n| format!("{n:#}"));
        }
    });
    name
}
