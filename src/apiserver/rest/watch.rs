//! WATCH: a subscription to a cache, written as frames that all watchers of the same form share.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderValue, Response, header};
use tokio::time::{Instant, sleep_until};
use windlass_api::ApiError;

use super::query::ListOptions;
use super::{Answer, Call, encode, read};
use crate::cache::stored::{Encoding, Form};
use crate::cache::{Delivery, ResourceCache, Subscription};
use crate::content::{self, As, Media};
use crate::core::Core;
use crate::metrics::{self, WatchCounter};
use crate::storage::Stored;

/// How long a watch lasts at least and, doubled, at most when the client says nothing.
const MIN_DURATION: Duration = Duration::from_secs(1800);
/// How often a watcher that wants bookmarks gets one, if there is anything to tell.
const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// A last bookmark comes this long before the end.
const BOOKMARK_BEFORE_END: Duration = Duration::from_secs(2);
/// Frames are sent in chunks of about this size when many are waiting.
const CHUNK: usize = 64 << 10;
/// Deliveries taken from the queue at once.
const BATCH: usize = 256;

/// Starts a watch.
pub async fn watch(call: &Call) -> Result<Answer, ApiError> {
    let options = ListOptions::parse(&call.query, true)?;
    let core = &call.core;
    let cache = core.objects.require_cache(&call.stored_as)?;
    let filter = read::filter(call, &cache, &options)?;
    let revision = options.revision()?;
    let initial = options.send_initial_events == Some(true);
    let mut since = None;
    if revision == 0 {
        if options.resource_version.is_empty() {
            core.objects.catch_up().await?;
        }
    } else if initial {
        core.objects.wait_for(revision).await?;
    } else {
        since = Some(revision);
    }
    // Taken before the subscription: everything up to here is in what the subscription begins with.
    let begun = core.objects.revision();
    let started = cache.watch(filter, since, initial);
    let (objects, subscription) = match started {
        Ok(started) => started,
        Err(old) => {
            let error = ApiError::expired(format!("too old resource version: {} ({})", old.requested, old.oldest));
            let frame = encode::error_frame(call, &error);
            return Ok(Answer::Raw(reply(call, content::full(frame))));
        }
    };
    let duration = options.timeout_seconds.map_or_else(
        || MIN_DURATION.mul_f64(1.0 + rand::random::<f64>()),
        |seconds| Duration::from_secs(seconds.min(1 << 31)),
    );
    let now = Instant::now();
    let stream = Stream {
        form: encode::form(call, call.output),
        labels: metrics::watch_counter(&call.resource.group, &call.version().name, &call.resource.plural),
        core: core.clone(),
        call: call.for_object(&call.info.namespace, &call.info.name),
        cache,
        initial: objects.into_iter(),
        ends_initial: (initial && options.bookmarks).then_some(begun),
        bookmarks: options.bookmarks,
        subscription,
        since: since.unwrap_or(0),
        told: since.unwrap_or(if initial { 0 } else { begun }),
        table_started: false,
        deadline: now + duration,
        next_bookmark: now + BOOKMARK_EVERY.min(duration.saturating_sub(BOOKMARK_BEFORE_END)).max(Duration::from_millis(500)),
        done: false,
    };
    let body = content::streamed(futures::stream::unfold(stream, |mut stream| async move {
        let chunk = stream.next().await?;
        Some((Ok(chunk), stream))
    }));
    Ok(Answer::Raw(reply(call, body)))
}

fn reply(call: &Call, body: content::ReplyBody) -> content::Reply {
    let mut response = Response::new(body);
    let kind = match call.output.media {
        Media::Protobuf => "application/vnd.kubernetes.protobuf;stream=watch",
        _ => content::JSON,
    };
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    response
}

/// A watch that is being written.
struct Stream {
    core: Arc<Core>,
    call: Call,
    cache: Arc<ResourceCache>,
    form: Form,
    labels: WatchCounter,
    initial: std::vec::IntoIter<Arc<Stored>>,
    /// The revision of the bookmark that ends the initial objects.
    ends_initial: Option<u64>,
    bookmarks: bool,
    subscription: Subscription,
    /// Changes up to here were not asked for (a watch may begin in the future).
    since: u64,
    /// The client knows that it has seen everything up to here.
    told: u64,
    table_started: bool,
    deadline: Instant,
    next_bookmark: Instant,
    done: bool,
}

impl Stream {
    /// The next chunk of frames; `None` ends the watch.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if self.done {
                return None;
            }
            if self.initial.len() > 0 {
                return Some(self.initial_chunk());
            }
            if let Some(revision) = self.ends_initial.take() {
                self.told = self.told.max(revision);
                return Some(self.or_error(|s| encode::bookmark(&s.call, revision, true)));
            }
            if !self.subscription.backlog.is_empty() {
                let backlog = std::mem::take(&mut self.subscription.backlog);
                if let Some(chunk) = self.frames(&backlog) {
                    return Some(chunk);
                }
            }
            let mut batch = Vec::new();
            let bookmark_at = if self.bookmarks { self.next_bookmark } else { self.deadline };
            tokio::select! {
                biased;
                n = self.subscription.queue.recv_many(&mut batch, BATCH) => {
                    if n == 0 {
                        return None;
                    }
                    if let Some(chunk) = self.frames(&batch) {
                        return Some(chunk);
                    }
                }
                () = sleep_until(bookmark_at), if self.bookmarks && bookmark_at < self.deadline => {
                    self.schedule_bookmark();
                    if let Some(chunk) = self.progress() {
                        return Some(chunk);
                    }
                }
                () = sleep_until(self.deadline) => return None,
                () = self.core.shutdown.cancelled() => return None,
            }
        }
    }

    fn schedule_bookmark(&mut self) {
        let now = Instant::now();
        let last = self.deadline.checked_sub(BOOKMARK_BEFORE_END).unwrap_or(self.deadline);
        self.next_bookmark = if now < last { (now + BOOKMARK_EVERY).min(last) } else { self.deadline };
    }

    /// A bookmark, if there is progress to tell.
    fn progress(&mut self) -> Option<Bytes> {
        // Whatever happened up to this revision is in the queue by now, if it concerns this watcher.
        let revision = self.core.objects.revision();
        let mut waiting = Vec::new();
        while let Ok(delivery) = self.subscription.queue.try_recv() {
            waiting.push(delivery);
        }
        let mut chunk = BytesMut::new();
        if let Some(frames) = self.frames(&waiting) {
            chunk.put_slice(&frames);
        }
        if revision > self.told && !self.done {
            self.told = revision;
            chunk.put_slice(&self.or_error(|s| encode::bookmark(&s.call, revision, false)));
        }
        (!chunk.is_empty()).then(|| chunk.freeze())
    }

    fn initial_chunk(&mut self) -> Bytes {
        let mut chunk = BytesMut::new();
        while chunk.len() < CHUNK {
            let Some(object) = self.initial.next() else { break };
            let frame = self.or_error(|s| s.make("ADDED", &object));
            self.labels.sent(frame.len());
            chunk.put_slice(&frame);
            if self.done {
                break;
            }
        }
        chunk.freeze()
    }

    fn frames(&mut self, batch: &[Delivery]) -> Option<Bytes> {
        let mut first: Option<Bytes> = None;
        let mut chunk = BytesMut::new();
        for delivery in batch {
            if delivery.revision() <= self.since {
                continue;
            }
            let frame = self.or_error(|s| s.delivered(delivery));
            self.told = self.told.max(delivery.revision());
            self.labels.sent(frame.len());
            match first.take() {
                None if chunk.is_empty() => first = Some(frame),
                None => chunk.put_slice(&frame),
                Some(before) => {
                    chunk.put_slice(&before);
                    chunk.put_slice(&frame);
                }
            }
            if self.done {
                break;
            }
        }
        first.or_else(|| (!chunk.is_empty()).then(|| chunk.freeze()))
    }

    /// The frame of a delivery, shared with every watcher of the same form.
    fn delivered(&mut self, delivery: &Delivery) -> Result<Bytes, ApiError> {
        let kind = delivery.change.as_str();
        if matches!(self.call.output.shape, As::Table(_)) {
            let object = delivery.object(self.cache.paths_ref());
            return self.make(kind, &object);
        }
        let paths = self.cache.paths_ref();
        delivery.frame(&self.form, || self.plain(kind, &delivery.object(paths)))
    }

    fn make(&mut self, kind: &str, object: &Stored) -> Result<Bytes, ApiError> {
        if let As::Table(version) = self.call.output.shape {
            let first = !std::mem::replace(&mut self.table_started, true);
            return encode::table_frame(&self.call, kind, object, version, first);
        }
        self.plain(kind, object)
    }

    fn plain(&self, kind: &str, object: &Stored) -> Result<Bytes, ApiError> {
        let bytes = match self.form.encoding {
            // Frames of changes are shared as a whole; there is no use in keeping their inner part as well.
            Encoding::Json if self.form.metadata_only || !self.call.is_storage_version() => encode::item(&self.call, object, &self.form)?,
            Encoding::Json => object.bytes.clone(),
            Encoding::Protobuf => encode::item(&self.call, object, &self.form)?,
        };
        let object_kind = if self.form.metadata_only { "PartialObjectMetadata" } else { self.call.resource.kind.as_str() };
        Ok(encode::frame(kind, &self.form.api_version, object_kind, self.form.encoding, &bytes))
    }

    /// A frame, or an ERROR frame that ends the watch.
    fn or_error(&mut self, make: impl FnOnce(&mut Self) -> Result<Bytes, ApiError>) -> Bytes {
        match make(self) {
            Ok(frame) => frame,
            Err(error) => {
                self.done = true;
                encode::error_frame(&self.call, &error)
            }
        }
    }
}
