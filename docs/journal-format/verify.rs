//! Verifies the rows of an export of a Cairn journal: private digests, row hashes, chain and base.
//! It needs no crate, and does not check signatures. docs/journal-format.md describes the format.
//!
//!     rustc -O verify.rs && ./verify journal.jsonl [POSITION:HASH]
//!
//! Exit code: 0 all checks pass, 1 something is broken, 2 it cannot be read, 3 all that can be checked
//! passes, but these are the rows of one session only.

use std::collections::HashMap;
use std::process::exit;

const K: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
];

/// SHA-256 in hexadecimal digits.
fn sha256(content: &[u8]) -> String {
    let mut state: [u32; 8] = [
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    ];
    let mut padded = content.to_vec();
    padded.push(0x80);
    while padded.len() % 64 != 56 {
        padded.push(0);
    }
    padded.extend_from_slice(&((content.len() as u64) * 8).to_be_bytes());
    for block in padded.chunks(64) {
        let mut w = [0u32; 64];
        for (n, word) in block.chunks(4).enumerate() {
            w[n] = u32::from_be_bytes([word[0], word[1], word[2], word[3]]);
        }
        for n in 16..64 {
            let a = w[n - 15].rotate_right(7) ^ w[n - 15].rotate_right(18) ^ (w[n - 15] >> 3);
            let b = w[n - 2].rotate_right(17) ^ w[n - 2].rotate_right(19) ^ (w[n - 2] >> 10);
            w[n] = w[n - 16].wrapping_add(a).wrapping_add(w[n - 7]).wrapping_add(b);
        }
        let mut s = state;
        for n in 0..64 {
            let e = s[4].rotate_right(6) ^ s[4].rotate_right(11) ^ s[4].rotate_right(25);
            let choice = (s[4] & s[5]) ^ (!s[4] & s[6]);
            let one = s[7].wrapping_add(e).wrapping_add(choice).wrapping_add(K[n]).wrapping_add(w[n]);
            let a = s[0].rotate_right(2) ^ s[0].rotate_right(13) ^ s[0].rotate_right(22);
            let two = a.wrapping_add((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            s = [one.wrapping_add(two), s[0], s[1], s[2], s[3].wrapping_add(one), s[4], s[5], s[6]];
        }
        for n in 0..8 {
            state[n] = state[n].wrapping_add(s[n]);
        }
    }
    state.iter().map(|word| format!("{word:08x}")).collect()
}

/// The end of the JSON value that begins at a place.
fn value_end(text: &[u8], begin: usize) -> Option<usize> {
    let (mut depth, mut at) = (0, begin);
    loop {
        match *text.get(at)? {
            b'"' => {
                at += 1;
                while *text.get(at)? != b'"' {
                    at += if text[at] == b'\\' { 2 } else { 1 };
                }
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 0 => return Some(at),
            b'}' | b']' => depth -= 1,
            b',' if depth == 0 => return Some(at),
            _ => {}
        }
        at += 1;
        if depth == 0 && matches!(text.get(at - 1), Some(b'"' | b'}' | b']')) {
            return Some(at);
        }
    }
}

/// The fields of an object, each as its text: hashes cover bytes, not values.
fn fields(line: &str) -> Option<HashMap<String, String>> {
    let text = line.as_bytes();
    let mut found = HashMap::new();
    let mut at = line.find('{')? + 1;
    loop {
        while text.get(at)?.is_ascii_whitespace() {
            at += 1;
        }
        let end = value_end(text, at)?;
        let key = string(&line[at..end])?;
        at = end + line[end..].find(':')? + 1;
        while text.get(at)?.is_ascii_whitespace() {
            at += 1;
        }
        let end = value_end(text, at)?;
        if found.insert(key, line[at..end].trim_end().to_string()).is_some() {
            return None; // a key that is there twice
        }
        match line[end..].trim_start().as_bytes().first()? {
            b',' => at = end + line[end..].find(',')? + 1,
            b'}' => return Some(found),
            _ => return None,
        }
    }
}

/// What a JSON string says.
fn string(text: &str) -> Option<String> {
    let inner = text.strip_prefix('"')?.strip_suffix('"')?;
    let (mut made, mut rest) = (String::new(), inner.chars());
    while let Some(letter) = rest.next() {
        if letter != '\\' {
            made.push(letter);
            continue;
        }
        match rest.next()? {
            'n' => made.push('\n'),
            't' => made.push('\t'),
            'r' => made.push('\r'),
            'b' => made.push('\u{8}'),
            'f' => made.push('\u{c}'),
            'u' => {
                let digits: String = rest.by_ref().take(4).collect();
                made.push(char::from_u32(u32::from_str_radix(&digits, 16).ok()?)?);
            }
            other => made.push(other),
        }
    }
    Some(made)
}

fn base64(text: &str) -> Option<Vec<u8>> {
    let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut made, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for letter in text.trim_end_matches('=').chars() {
        bits = bits << 6 | alphabet.find(letter)? as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            made.push((bits >> count) as u8);
        }
    }
    Some(made)
}

/// The bytes of a payload: an object's text, or what base64 says; None inside for null.
fn stored(text: &str) -> Option<Option<Vec<u8>>> {
    match text {
        "null" => Some(None),
        _ if text.starts_with('{') => Some(Some(text.as_bytes().to_vec())),
        _ => Some(Some(base64(&string(text)?)?)),
    }
}

/// Microseconds since 1970 of a time as an export writes it: 2026-01-31T12:00:00.000000Z.
fn microseconds(text: &str) -> Option<i64> {
    if !text.starts_with('"') {
        return text.parse().ok();
    }
    let text = string(text)?;
    let form = text.bytes().map(|one| if one.is_ascii_digit() { b'0' } else { one });
    if !form.eq(*b"0000-00-00T00:00:00.000000Z") {
        return None;
    }
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<i64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    // Days of the civil calendar; the year begins in March.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, of_era) = (y.div_euclid(400), y.rem_euclid(400));
    let days = era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + (153 * m + 2) / 5 + day - 719469;
    let seconds = days * 86400 + number(11, 13)? * 3600 + number(14, 16)? * 60 + number(17, 19)?;
    Some(seconds * 1_000_000 + number(20, 26)?)
}

/// Parts, each with its length in eight bytes before it.
fn joined(parts: &[&[u8]]) -> Vec<u8> {
    let mut all = Vec::new();
    for part in parts {
        all.extend_from_slice(&(part.len() as u64).to_be_bytes());
        all.extend_from_slice(part);
    }
    all
}

struct Checked {
    faults: Vec<String>,
    seen: HashMap<u64, String>,
    position: u64,
    head: String,
    excerpt: bool,
}

fn verify(text: &str) -> Option<Checked> {
    let genesis = "0".repeat(64);
    let mut done = Checked { faults: vec![], seen: HashMap::new(), position: 0, head: genesis, excerpt: false };
    let (mut base, mut named, mut excerpt) = (None, None, false);
    let (mut of, mut count) = (String::new(), 0u64);
    for (number, line) in text.lines().enumerate() {
        let raw = fields(line)?;
        let get = |name: &str| raw.get(name).cloned();
        let text_of = |name: &str| string(raw.get(name)?);
        if raw.contains_key("checkpoint") {
            continue;
        }
        let position: u64 = get("position")?.parse().ok()?;
        if number == 0 && (raw.contains_key("base") || raw.contains_key("excerpt")) {
            excerpt = raw.contains_key("excerpt");
            let (head, digest) = (text_of("head")?, text_of("state_digest")?);
            if let Some(state) = stored(&get("state").unwrap_or("null".to_string()))? {
                if sha256(&state) != digest {
                    done.faults.push("the state of the base was changed".to_string());
                }
            }
            if excerpt {
                (of, count) = (text_of("stream")?, get("seq")?.parse().ok()?);
            }
            let place = position.to_string();
            let parts = joined(&[place.as_bytes(), head.as_bytes(), digest.as_bytes()]);
            base = (!excerpt).then(|| sha256(&[b"cairn base 1".as_slice(), &parts].concat()));
            done.seen.insert(position, head.clone());
            (done.position, done.head) = (position, head);
            continue;
        }
        let stream = text_of("stream")?;
        if number == 0 && position > 1 && stream.starts_with("session/") {
            (excerpt, of) = (true, stream.clone());
        }
        let seq: u64 = get("seq")?.parse().ok()?;
        count += 1;
        if excerpt && (&stream, seq) != (&of, count) {
            done.faults.push(format!("row {position}: rows are missing before it"));
        }
        let (previous, hash, digest) = (text_of("previous_hash")?, text_of("hash")?, text_of("private_digest")?);
        if (!excerpt || position == done.position + 1) && previous != done.head {
            done.faults.push(format!("row {position} is not chained to the one before"));
        }
        if let Some(private) = stored(&get("private")?)? {
            if sha256(&private) != digest {
                done.faults.push(format!("row {position}: the private payload was changed"));
            }
        }
        let version: u32 = get("version")?.parse().ok()?;
        let time = u64::try_from(microseconds(&get("time")?)?).ok()?;
        let (event_id, kind, public) = (text_of("event_id")?, text_of("kind")?, stored(&get("payload")?)??);
        let due = sha256(&joined(&[
            previous.as_bytes(),
            &position.to_be_bytes(),
            stream.as_bytes(),
            &seq.to_be_bytes(),
            event_id.as_bytes(),
            kind.as_bytes(),
            &version.to_be_bytes(),
            &time.to_be_bytes(),
            &public,
            digest.as_bytes(),
        ]));
        if due != hash {
            done.faults.push(format!("row {position} was changed"));
        }
        if kind == "journal_pruned" {
            named = string(fields(&get("payload")?)?.get("base_digest")?);
        }
        done.seen.insert(position, hash.clone());
        (done.position, done.head) = (position, hash);
    }
    if !excerpt && base != named {
        done.faults.push("the base is not the one that the last journal_pruned names".to_string());
    }
    done.excerpt = excerpt;
    Some(done)
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let path = arguments.get(1).map_or("", String::as_str);
    let read = std::fs::read_to_string(path).ok();
    let Some(mut done) = read.and_then(|text| verify(&text)) else {
        println!("{path} cannot be read");
        exit(2);
    };
    if let Some((position, hash)) = arguments.get(2).and_then(|head| head.split_once(':')) {
        let found = position.parse().ok().and_then(|at: u64| done.seen.get(&at));
        if found.map(String::as_str) != Some(hash) {
            done.faults.push(format!("the head of row {position} is not in the chain"));
        }
    }
    for fault in &done.faults {
        println!("{fault}");
    }
    println!("head: {}:{}", done.position, done.head);
    println!("broken: {}", done.faults.len());
    if done.excerpt {
        println!("not checked: whether rows of other sessions were changed or removed (an excerpt)");
    }
    exit(if !done.faults.is_empty() { 1 } else if done.excerpt { 3 } else { 0 });
}
