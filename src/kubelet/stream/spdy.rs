//! SPDY/3.1, as far as Kubernetes speaks it: streams of bytes over one connection, no HTTP on top, no flow control.
//!
//! [`Codec`] turns bytes into frames and back without I/O; [`serve`] runs one connection.

use std::collections::HashMap;
use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::dictionary;

const VERSION: u16 = 3;
/// Data frames larger than this are split when written.
const MAX_DATA: usize = 32 * 1024;
/// Frames larger than this are refused when read.
const MAX_FRAME: usize = 1 << 20;
const MAX_HEADERS: usize = 64 * 1024;
/// Streams that may be open at once on one connection.
const MAX_STREAMS: usize = 1024;
/// Chunks of data that may wait for their reader before the whole connection waits.
const STREAM_QUEUE: usize = 128;
const OUT_QUEUE: usize = 64;

const FLAG_FIN: u8 = 1;

pub type Headers = Vec<(String, String)>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    Open { stream: u32, fin: bool, headers: Headers },
    Reply { stream: u32, headers: Headers },
    Reset { stream: u32, status: u32 },
    Ping(u32),
    GoAway,
    Data { stream: u32, fin: bool, data: Bytes },
    /// Frames that ask for nothing from us: SETTINGS, WINDOW_UPDATE, HEADERS.
    Other,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("SPDY: {0}")]
    Protocol(&'static str),
    #[error("SPDY connection: {0}")]
    Io(#[from] io::Error),
}

/// One connection's framing; the header compression of each direction goes on from frame to frame.
pub struct Codec {
    inflate: Decompress,
    deflate: Compress,
    primed: bool,
}

impl Default for Codec {
    fn default() -> Self {
        Self { inflate: Decompress::new(true), deflate: Compress::new(Compression::best(), true), primed: false }
    }
}

impl Codec {
    /// Takes one frame off `input`, `None` when it is not complete yet.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, Error> {
        if input.len() < 8 {
            return Ok(None);
        }
        let length = usize::from(input[5]) << 16 | usize::from(input[6]) << 8 | usize::from(input[7]);
        if length > MAX_FRAME {
            return Err(Error::Protocol("frame too large"));
        }
        if input.len() < 8 + length {
            return Ok(None);
        }
        let head = input.split_to(8);
        let mut body = input.split_to(length).freeze();
        let flags = head[4];
        if head[0] & 0x80 == 0 {
            let stream = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
            return Ok(Some(Frame::Data { stream, fin: flags & FLAG_FIN != 0, data: body }));
        }
        if u16::from_be_bytes([head[0] & 0x7f, head[1]]) != VERSION {
            return Err(Error::Protocol("unknown protocol version"));
        }
        let kind = u16::from_be_bytes([head[2], head[3]]);
        let need = |body: &Bytes, n: usize| if body.len() < n { Err(Error::Protocol("frame too short")) } else { Ok(()) };
        Ok(Some(match kind {
            1 => {
                need(&body, 10)?;
                let stream = body.get_u32() & 0x7fff_ffff;
                body.advance(6);
                Frame::Open { stream, fin: flags & FLAG_FIN != 0, headers: self.headers(&body)? }
            }
            2 => {
                need(&body, 4)?;
                let stream = body.get_u32() & 0x7fff_ffff;
                Frame::Reply { stream, headers: self.headers(&body)? }
            }
            3 => {
                need(&body, 8)?;
                Frame::Reset { stream: body.get_u32() & 0x7fff_ffff, status: body.get_u32() }
            }
            6 => {
                need(&body, 4)?;
                Frame::Ping(body.get_u32())
            }
            7 => Frame::GoAway,
            8 => {
                need(&body, 4)?;
                body.advance(4);
                // The compression context has to see it even though nobody reads it.
                self.headers(&body)?;
                Frame::Other
            }
            _ => Frame::Other,
        }))
    }

    fn headers(&mut self, block: &[u8]) -> Result<Headers, Error> {
        let bad = || Error::Protocol("header block cannot be decompressed");
        let mut out: Vec<u8> = Vec::with_capacity(4096);
        let mut input = block;
        loop {
            let (read, written) = (self.inflate.total_in(), out.len());
            match self.inflate.decompress_vec(input, &mut out, FlushDecompress::Sync) {
                Ok(_) => {}
                Err(e) if e.needs_dictionary().is_some() => {
                    self.inflate.set_dictionary(&dictionary::bytes()).map_err(|_| bad())?;
                }
                Err(_) => return Err(bad()),
            }
            let taken = usize::try_from(self.inflate.total_in() - read).unwrap_or(0);
            input = &input[taken.min(input.len())..];
            if input.is_empty() && out.len() < out.capacity() {
                break;
            }
            if out.len() >= MAX_HEADERS {
                return Err(Error::Protocol("header block too large"));
            }
            if taken == 0 && out.len() == written && out.len() < out.capacity() {
                return Err(bad());
            }
            out.reserve(4096);
        }
        parse_headers(Bytes::from(out))
    }

    /// Appends a frame to `output`.
    pub fn encode(&mut self, frame: &Frame, output: &mut BytesMut) -> Result<(), Error> {
        let mut control = |kind: u16, flags: u8, body: &[u8]| {
            output.put_u16(0x8000 | VERSION);
            output.put_u16(kind);
            // Our control frames are far below 2^24 bytes.
            output.put_u32(u32::from(flags) << 24 | body.len() as u32);
            output.put_slice(body);
        };
        match frame {
            Frame::Open { stream, fin, headers } => {
                let mut body = BytesMut::new();
                body.put_u32(*stream);
                body.put_u32(0);
                body.put_u16(0);
                body.put_slice(&self.compress(headers)?);
                control(1, if *fin { FLAG_FIN } else { 0 }, &body);
            }
            Frame::Reply { stream, headers } => {
                let mut body = BytesMut::new();
                body.put_u32(*stream);
                body.put_slice(&self.compress(headers)?);
                control(2, 0, &body);
            }
            Frame::Reset { stream, status } => {
                let mut body = BytesMut::new();
                body.put_u32(*stream);
                body.put_u32(*status);
                control(3, 0, &body);
            }
            Frame::Ping(id) => control(6, 0, &id.to_be_bytes()),
            Frame::GoAway => control(7, 0, &[0; 8]),
            Frame::Other => {}
            Frame::Data { stream, fin, data } => {
                let mut rest = data.clone();
                loop {
                    let part = rest.split_to(rest.len().min(MAX_DATA));
                    let last = rest.is_empty();
                    output.put_u32(*stream & 0x7fff_ffff);
                    let flags = if *fin && last { FLAG_FIN } else { 0 };
                    output.put_u32(u32::from(flags) << 24 | part.len() as u32);
                    output.put_slice(&part);
                    if last {
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    fn compress(&mut self, headers: &Headers) -> Result<Vec<u8>, Error> {
        let bad = || Error::Protocol("header block cannot be compressed");
        if !self.primed {
            self.primed = true;
            self.deflate.set_dictionary(&dictionary::bytes()).map_err(|_| bad())?;
        }
        let mut plain = BytesMut::new();
        plain.put_u32(headers.len() as u32);
        for (name, value) in headers {
            plain.put_u32(name.len() as u32);
            plain.put_slice(name.to_ascii_lowercase().as_bytes());
            plain.put_u32(value.len() as u32);
            plain.put_slice(value.as_bytes());
        }
        let mut out = Vec::with_capacity(plain.len() + 256);
        let mut input = &plain[..];
        loop {
            let read = self.deflate.total_in();
            self.deflate.compress_vec(input, &mut out, FlushCompress::Sync).map_err(|_| bad())?;
            let taken = usize::try_from(self.deflate.total_in() - read).unwrap_or(0);
            input = &input[taken.min(input.len())..];
            if input.is_empty() && out.len() < out.capacity() {
                return Ok(out);
            }
            out.reserve(1024);
        }
    }
}

fn parse_headers(mut block: Bytes) -> Result<Headers, Error> {
    let short = || Error::Protocol("header block too short");
    let text = |block: &mut Bytes| -> Result<String, Error> {
        if block.len() < 4 {
            return Err(short());
        }
        let length = block.get_u32() as usize;
        if block.len() < length {
            return Err(short());
        }
        Ok(String::from_utf8_lossy(&block.split_to(length)).into_owned())
    };
    if block.len() < 4 {
        return Err(short());
    }
    let count = block.get_u32() as usize;
    if count > 256 {
        return Err(Error::Protocol("too many headers"));
    }
    let mut headers = Headers::with_capacity(count);
    for _ in 0..count {
        headers.push((text(&mut block)?, text(&mut block)?));
    }
    Ok(headers)
}

/// A stream that the peer has opened.
pub struct Stream {
    pub headers: Headers,
    /// Data from the peer; ends with its FIN.
    pub data: mpsc::Receiver<Bytes>,
    pub writer: Writer,
}

impl Stream {
    pub fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map_or("", |(_, v)| v.as_str())
    }
}

/// Our direction of a stream.
#[derive(Clone)]
pub struct Writer {
    stream: u32,
    out: mpsc::Sender<Frame>,
}

impl Writer {
    /// Errors when the connection is gone.
    pub async fn write(&self, data: Bytes) -> io::Result<()> {
        self.send(Frame::Data { stream: self.stream, fin: false, data }).await
    }

    /// Says that no more data comes from us.
    pub async fn finish(&self) -> io::Result<()> {
        self.send(Frame::Data { stream: self.stream, fin: true, data: Bytes::new() }).await
    }

    /// Ends the stream in both directions.
    pub async fn reset(&self) -> io::Result<()> {
        self.send(Frame::Reset { stream: self.stream, status: 5 }).await
    }

    async fn send(&self, frame: Frame) -> io::Result<()> {
        self.out.send(frame).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// A running connection. Dropping it closes the connection.
pub struct Connection {
    /// Streams as the peer opens them; ends with the connection.
    pub streams: mpsc::Receiver<Stream>,
    out: mpsc::Sender<Frame>,
    writer: Option<tokio::task::JoinHandle<()>>,
    _reader: AbortOnDropHandle<()>,
}

impl Connection {
    /// Waits until everything that was written is on its way, then closes.
    pub async fn close(mut self) {
        let _ = self.out.send(Frame::GoAway).await;
        let Some(writer) = self.writer.take() else { return };
        let (dead, _) = mpsc::channel(1);
        self.out = dead;
        let _ = tokio::time::timeout(std::time::Duration::from_secs(5), writer).await;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.abort();
        }
    }
}

/// Serves the accepting side of a connection over `io`.
pub fn serve<S: AsyncRead + AsyncWrite + Send + 'static>(io: S) -> Connection {
    let (read, write) = tokio::io::split(io);
    let (opened, streams) = mpsc::channel(16);
    let (out, frames) = mpsc::channel(OUT_QUEUE);
    // The codec is shared in halves: reading inflates, writing deflates.
    let writer = tokio::spawn(write_frames(write, frames));
    let replies = out.downgrade();
    let reader = tokio::spawn(async move {
        if let Err(error) = read_frames(read, opened, replies).await {
            tracing::debug!(%error, "SPDY connection ended");
        }
    });
    Connection { streams, out, writer: Some(writer), _reader: AbortOnDropHandle::new(reader) }
}

async fn write_frames<W: AsyncWrite + Send + Unpin>(mut io: W, mut frames: mpsc::Receiver<Frame>) {
    let mut codec = Codec::default();
    let mut buffer = BytesMut::new();
    while let Some(frame) = frames.recv().await {
        if codec.encode(&frame, &mut buffer).is_err() {
            return;
        }
        while buffer.len() < 2 * MAX_DATA {
            let Ok(frame) = frames.try_recv() else { break };
            if codec.encode(&frame, &mut buffer).is_err() {
                return;
            }
        }
        if io.write_all(&buffer).await.is_err() || io.flush().await.is_err() {
            return;
        }
        buffer.clear();
    }
    let _ = io.shutdown().await;
}

async fn read_frames<R: AsyncRead + Send + Unpin>(mut io: R, opened: mpsc::Sender<Stream>, out: mpsc::WeakSender<Frame>) -> Result<(), Error> {
    let mut codec = Codec::default();
    let mut buffer = BytesMut::with_capacity(16 * 1024);
    let mut open: HashMap<u32, mpsc::Sender<Bytes>> = HashMap::new();
    loop {
        while let Some(frame) = codec.decode(&mut buffer)? {
            let Some(out) = out.upgrade() else { return Ok(()) };
            match frame {
                Frame::Open { stream, fin, headers } => {
                    if stream % 2 == 0 || open.contains_key(&stream) {
                        return Err(Error::Protocol("stream id not allowed"));
                    }
                    if open.len() >= MAX_STREAMS {
                        let _ = out.send(Frame::Reset { stream, status: 3 }).await;
                        continue;
                    }
                    let (sender, data) = mpsc::channel(STREAM_QUEUE);
                    if !fin {
                        open.insert(stream, sender);
                    }
                    let _ = out.send(Frame::Reply { stream, headers: Vec::new() }).await;
                    let made = Stream { headers, data, writer: Writer { stream, out } };
                    if opened.send(made).await.is_err() {
                        return Ok(());
                    }
                }
                Frame::Data { stream, fin, data } => {
                    if let Some(sender) = open.get(&stream)
                        && !data.is_empty()
                    {
                        // A reader that is gone wants nothing; the others go on.
                        let _ = sender.send(data).await;
                    }
                    if fin {
                        open.remove(&stream);
                    }
                }
                Frame::Reset { stream, .. } => {
                    open.remove(&stream);
                }
                Frame::Ping(id) if id % 2 == 1 => {
                    let _ = out.send(Frame::Ping(id)).await;
                }
                Frame::GoAway => return Ok(()),
                Frame::Ping(_) | Frame::Reply { .. } | Frame::Other => {}
            }
        }
        if io.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&str, &str)]) -> Headers {
        list.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
    }

    fn round_trip(frames: &[Frame]) -> Vec<Frame> {
        let (mut writer, mut reader) = (Codec::default(), Codec::default());
        let mut wire = BytesMut::new();
        for frame in frames {
            writer.encode(frame, &mut wire).expect("encode");
        }
        let mut out = Vec::new();
        let mut input = BytesMut::new();
        // Byte by byte: no frame may need more than it has.
        for byte in wire {
            input.put_u8(byte);
            while let Some(frame) = reader.decode(&mut input).expect("decode") {
                out.push(frame);
            }
        }
        assert!(input.is_empty());
        out
    }

    #[test]
    fn frames_survive_the_wire() {
        let frames = [
            Frame::Open { stream: 1, fin: false, headers: headers(&[("streamtype", "error"), ("port", "80")]) },
            Frame::Open { stream: 3, fin: true, headers: headers(&[("streamtype", "data"), ("port", "80"), ("requestid", "0")]) },
            Frame::Reply { stream: 1, headers: Vec::new() },
            Frame::Data { stream: 1, fin: false, data: Bytes::from_static(b"hello") },
            Frame::Data { stream: 1, fin: true, data: Bytes::new() },
            Frame::Reset { stream: 3, status: 5 },
            Frame::Ping(7),
            Frame::GoAway,
        ];
        assert_eq!(round_trip(&frames), frames);
    }

    #[test]
    fn large_data_is_split() {
        let data = Bytes::from(vec![7; MAX_DATA * 2 + 5]);
        let got = round_trip(&[Frame::Data { stream: 1, fin: true, data: data.clone() }]);
        let sizes: Vec<(usize, bool)> = got.iter().map(|f| if let Frame::Data { data, fin, .. } = f { (data.len(), *fin) } else { (0, false) }).collect();
        assert_eq!(sizes, [(MAX_DATA, false), (MAX_DATA, false), (5, true)]);
    }

    #[test]
    fn damaged_input_is_an_error() {
        let check = |bytes: &[u8]| assert!(Codec::default().decode(&mut BytesMut::from(bytes)).is_err(), "{bytes:?}");
        check(&[0x80, 2, 0, 1, 0, 0, 0, 0]);
        check(&[0x80, 3, 0, 1, 0, 0, 0, 2, 0, 0]);
        check(&[0, 0, 0, 1, 0, 0xff, 0xff, 0xff]);
        let mut open = vec![0x80, 3, 0, 1, 0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        open.extend([0xff; 10]);
        check(&open);
    }

    #[tokio::test]
    async fn a_connection_echoes() {
        let (client, server) = tokio::io::duplex(64 * 1024);
        let mut connection = serve(server);
        let mut codec = Codec::default();
        let mut wire = BytesMut::new();
        for frame in [
            Frame::Open { stream: 1, fin: false, headers: headers(&[("streamType", "data")]) },
            Frame::Data { stream: 1, fin: true, data: Bytes::from_static(b"ping") },
            Frame::Ping(1),
        ] {
            codec.encode(&frame, &mut wire).expect("encode");
        }
        let (mut read, mut write) = tokio::io::split(client);
        write.write_all(&wire).await.expect("write");
        let mut stream = connection.streams.recv().await.expect("stream");
        assert_eq!(stream.header("streamtype"), "data");
        assert_eq!(stream.data.recv().await.as_deref(), Some(&b"ping"[..]));
        assert_eq!(stream.data.recv().await, None);
        stream.writer.write(Bytes::from_static(b"pong")).await.expect("write");
        stream.writer.finish().await.expect("finish");
        drop(stream);
        connection.close().await;
        let mut got = BytesMut::new();
        while read.read_buf(&mut got).await.expect("read") > 0 {}
        let mut frames = Vec::new();
        while let Some(frame) = codec.decode(&mut got).expect("decode") {
            frames.push(frame);
        }
        assert!(frames.contains(&Frame::Reply { stream: 1, headers: Vec::new() }) && frames.contains(&Frame::Ping(1)));
        assert!(frames.contains(&Frame::Data { stream: 1, fin: false, data: Bytes::from_static(b"pong") }));
        assert!(frames.contains(&Frame::Data { stream: 1, fin: true, data: Bytes::new() }));
    }
}
