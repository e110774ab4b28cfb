//! The dictionary with which SPDY/3 primes its header compression: fixed by section 2.6.10.1 of the protocol's draft.

/// The part of length-prefixed words.
const WORDS: [&str; 65] = [
    "options", "head", "post", "put", "delete", "trace", "accept", "accept-charset", "accept-encoding",
    "accept-language", "accept-ranges", "age", "allow", "authorization", "cache-control", "connection",
    "content-base", "content-encoding", "content-language", "content-length", "content-location", "content-md5",
    "content-range", "content-type", "date", "etag", "expect", "expires", "from", "host", "if-match",
    "if-modified-since", "if-none-match", "if-range", "if-unmodified-since", "last-modified", "location",
    "max-forwards", "pragma", "proxy-authenticate", "proxy-authorization", "range", "referer", "retry-after",
    "server", "te", "trailer", "transfer-encoding", "upgrade", "user-agent", "vary", "via", "warning",
    "www-authenticate", "method", "get", "status", "200 OK", "version", "HTTP/1.1", "url", "public",
    "set-cookie", "keep-alive", "origin",
];

/// The part of plain text.
const TEXT: &str = "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritativ\
    e Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not Found500 I\
    nternal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec \
    00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xm\
    l,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=\
    iso-8859-1,utf-,*,enq=0.";

/// The dictionary's bytes.
pub(super) fn bytes() -> Vec<u8> {
    let mut out = Vec::with_capacity(1423);
    for word in WORDS {
        // The longest word has 27 bytes.
        out.extend([0, 0, 0, word.len() as u8]);
        out.extend(word.as_bytes());
    }
    out.extend(TEXT.as_bytes());
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_dictionary_is_the_drafts() {
        let bytes = super::bytes();
        let sum = bytes.iter().fold((1_u32, 0_u32), |(a, b), byte| ((a + u32::from(*byte)) % 65521, (b + a + u32::from(*byte)) % 65521));
        // Every SPDY/3 peer names this Adler-32 in its first header block.
        assert_eq!((bytes.len(), (sum.1 << 16) | sum.0), (1423, 0xe3c6a7c2));
    }
}
