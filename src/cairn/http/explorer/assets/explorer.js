// The explorer's only script: what is live, the keyboard, and the chat.
// It makes nodes and sets their text. No text becomes HTML: the policy of the pages forbids that, too.
"use strict";

const $ = (query, within = document) => within.querySelector(query);
const all = (query, within = document) => [...within.querySelectorAll(query)];
const where = document.body.dataset.page;

function node(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// --- pages that are fetched again --------------------------------------------------------------

// Parsed by the browser as a document whose scripts do not run.
function fetchPage(address, timeout = 0) {
  return new Promise((resolve, reject) => {
    const asked = new XMLHttpRequest();
    asked.open("GET", address);
    asked.responseType = "document";
    asked.timeout = timeout;
    asked.setRequestHeader("accept", "text/html");
    asked.onload = () => (asked.status === 200 && asked.response ? resolve(asked.response) : reject(asked.status));
    asked.onerror = asked.ontimeout = () => reject(0);
    asked.send();
  });
}

async function refresh() {
  const found = await fetchPage(location.href);
  for (const part of all("[data-live]")) {
    const fresh = $(`[data-live="${part.dataset.live}"]`, found);
    // What a person has opened or is typing in stays as it is.
    if (!fresh || part.contains(document.activeElement) || $("details[open]:not(.call)", part)) continue;
    const at = all("[data-row]", part).findIndex((row) => row.classList.contains("is-at"));
    part.replaceWith(document.adoptNode(fresh));
    if (at >= 0) all("[data-row]", fresh)[at]?.classList.add("is-at");
    enhance(fresh);
  }
}

const SILENT_MS = 40000, AGAIN_MS = 3000, LATER_MS = 15000;
let heard = Date.now(), isLost = false, source = null;

// Why the page does not follow the server; no words if it does.
function say(...words) {
  isLost = words.length > 0;
  const place = $("#connection");
  // A screen reader reads what is set.
  if (place.textContent !== node("p", {}, ...words).textContent) place.replaceChildren(...words);
  place.hidden = !isLost;
  $(".state .dot")?.classList.toggle("lost", isLost);
}

function follow() {
  if (!window.EventSource || !["sessions", "session", "cache", "bugs", "models", "live"].includes(where)) return;
  source = new EventSource("/explorer/live/stream");
  let seen = null, due = 0, silence = 0, opened = false;
  const hear = () => {
    heard = Date.now();
    clearTimeout(silence);
    silence = setTimeout(lose, SILENT_MS);
  };

  // The stream ended, or could not be opened. It does not say why: a page does.
  async function lose() {
    source.close();
    clearTimeout(silence);
    current = last = null;
    const status = await fetchPage(location.href, SILENT_MS).then(() => 200, (failed) => failed);
    if (status === 401) {
      const to = encodeURIComponent(location.pathname + location.search);
      say("This server requires a login now. ", node("a", { href: `/explorer/login?next=${to}` }, "Log in"));
      return addEventListener("focus", follow, { once: true });  // it may be done in another tab
    }
    if (status === 200 && !opened) say("This page does not follow the server: too many pages are open. Close one.");
    else if (status === 503) say("The server is starting. This page goes on when it is ready.");
    else if (status === 0) say(`The server does not answer; last seen at ${new Date(heard).toLocaleTimeString()}. This page goes on when it answers again.`);
    else if (status !== 200) say(`The server answers, but this page cannot be read any more (status ${status}).`);
    setTimeout(follow, status === 200 && !opened ? LATER_MS : AGAIN_MS);
  }

  source.addEventListener("open", () => {
    opened = true;
    hear();
    if (!isLost) return;
    say();
    refresh().catch(() => {});
  });
  source.addEventListener("alive", hear);
  source.addEventListener("frame", (event) => {
    hear();
    const frame = JSON.parse(event.data), known = JSON.stringify(frame.models);
    const now = where === "live" ? known : JSON.stringify([frame.changes, known]);
    if (where === "live") drawLive(frame);
    if (seen !== null && now !== seen && !due) {
      due = setTimeout(() => { due = 0; refresh().catch(() => {}); }, 1500);
    }
    seen = now;
  });
  source.addEventListener("error", lose);
}

addEventListener("pagehide", () => source?.close());

// --- live --------------------------------------------------------------------------------------

const TICKS = 120;
const strip = [];
let last = null, current = null;

function drawLive(frame) {
  current = frame;
  for (const name of ["running", "queued"]) {
    const value = $(`[data-value="${name}"]`);
    if (value) value.textContent = frame[name];
  }
  for (const [id, list] of [["flights", frame.flights], ["ended", frame.ended]]) {
    const place = $(`#${id}`);
    if (place.contains(document.activeElement)) continue;
    place.replaceChildren(...list.map(flight));
    if (!list.length) place.append(node("li", { class: "empty" }, place.dataset.empty));
  }
}

const number = (value) => value.toLocaleString("en");

function duration(us) {
  if (us < 1e6) return `${Math.round(us / 1000)} ms`;
  if (us < 60e6) return `${(us / 1e6).toFixed(1)} s`;
  return us < 3600e6 ? `${Math.floor(us / 60e6)} min` : `${Math.floor(us / 3600e6)} h`;
}

function flight(one) {
  const link = node("a", { href: `/explorer/session?id=${encodeURIComponent(one.session)}` }, one.words || one.session);
  const how = [one.end ?? one.phase, one.client, one.decision].filter(Boolean).join(" · ");
  const took = one.ended_us ? ` · ${duration(one.ended_us - one.received_us)}` : "";
  return node("li", { "data-row": "" }, link, " ", node("span", { class: "quiet" },
    `${how} · ${number(one.reused)} reused of ${number(one.prompt)} · ${number(one.computed)} computed · ${number(one.generated)} generated${took}`));
}

function tick() {
  if (!current) return;
  const now = current.tokens;
  if (last) {
    strip.push({ computed: now.prefill - last.prefill, generated: now.decode - last.decode, prewarmed: now.settle - last.settle });
    if (strip.length > TICKS) strip.shift();
  }
  last = now;
  const most = Math.max(8, ...strip.map((one) => one.computed + one.generated + one.prewarmed));
  const bars = [];
  strip.forEach((one, place) => {
    let top = 80;
    for (const kind of ["computed", "generated", "prewarmed"]) {
      const height = (78 * one[kind]) / most;
      if (height <= 0) continue;
      top -= height;
      bars.push(svg("rect", { class: `bar-${kind}`, x: (TICKS - strip.length + place) * 4, y: top, width: 3, height }));
    }
  });
  $("#strip").replaceChildren(...bars);
  const recent = strip.slice(-4), per = (kind) => Math.round(recent.reduce((sum, one) => sum + one[kind], 0) / Math.max(1, recent.length) * 2);
  $('[data-value="prefill-speed"]').textContent = number(per("computed"));
  $('[data-value="decode-speed"]').textContent = number(per("generated"));
}

// --- the keyboard ------------------------------------------------------------------------------

let going = false;
const places = { s: "/", c: "/explorer/chat", l: "/explorer/live", b: "/explorer/bugs" };

function move(step) {
  const rows = all("[data-row]").filter((row) => row.offsetParent !== null);
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.classList.contains("is-at"));
  const next = Math.min(rows.length - 1, Math.max(0, at + step));
  rows[at]?.classList.remove("is-at");
  rows[next].classList.add("is-at");
  rows[next].scrollIntoView({ block: "nearest" });
}

function open(row) {
  const details = row.matches("details") ? row : $("details", row);
  const link = $("a.words", row) ?? (details ? null : $("a", row));
  if (link) link.click();
  else if (details) details.open = !details.open;
}

addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select");
  if (event.key === "Escape" && typing) return typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
  const at = $("[data-row].is-at");
  if (going && places[event.key]) location.href = places[event.key];
  else if (event.key === "/") { const search = $("[data-search]"); search?.focus(); search?.select?.(); }
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "Enter" && at && !event.target.closest("a, button, summary")) open(at);
  else if (event.key === "?") $("#keys").showModal();
  else { going = event.key === "g"; return; }
  going = false;
  event.preventDefault();
});

// --- Markdown, as nodes ------------------------------------------------------------------------

const INLINE = /(`+)([\s\S]+?)\1|\*\*([^\n]+?)\*\*|(?<![\w*])\*([^\s*][^*\n]*?)\*(?!\w)|~~([^\n]+?)~~|\[([^\]\n]+)\]\(([^()\s]+)\)/g;

function inline(text, depth = 0) {
  const found = [];
  let from = 0;
  for (const one of depth < 4 ? text.matchAll(INLINE) : []) {
    if (one.index > from) found.push(text.slice(from, one.index));
    if (one[2] !== undefined) found.push(node("code", {}, one[2].trim()));
    else if (one[3] !== undefined) found.push(node("strong", {}, ...inline(one[3], depth + 1)));
    else if (one[4] !== undefined) found.push(node("em", {}, ...inline(one[4], depth + 1)));
    else if (one[5] !== undefined) found.push(node("s", {}, ...inline(one[5], depth + 1)));
    else found.push(link(one[6], one[7]));
    from = one.index + one[0].length;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}

// Only addresses of the web become links, and they show where they lead: a model may be made to lie.
function link(words, address) {
  if (!/^https?:\/\//i.test(address)) return `[${words}](${address})`;
  return node("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank", title: address }, words);
}

function markdown(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n"), found = [];
  let at = 0;
  const paragraph = [];
  const flush = () => { if (paragraph.length) found.push(node("p", {}, ...inline(paragraph.splice(0).join("\n")))); };
  while (at < lines.length) {
    const line = lines[at];
    const fence = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    const item = /^\s*([-*+]|\d{1,9}[.)])\s+/.exec(line);
    if (fence) {
      flush();
      const code = [];
      for (at += 1; at < lines.length && !lines[at].trim().startsWith(fence[1]); at += 1) code.push(lines[at]);
      at += 1;
      found.push(codeBlock(code.join("\n")));
      continue;
    }
    if (heading) { flush(); found.push(node(`h${Math.min(3, heading[1].length)}`, {}, ...inline(heading[2]))); }
    else if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) { flush(); found.push(node("hr")); }
    else if (/^\s{0,3}>/.test(line)) {
      flush();
      const quoted = [];
      for (; at < lines.length && /^\s{0,3}>/.test(lines[at]); at += 1) quoted.push(lines[at].replace(/^\s{0,3}> ?/, ""));
      found.push(node("blockquote", {}, ...inline(quoted.join("\n"))));
      continue;
    } else if (item) {
      flush();
      const list = node(/\d/.test(item[1]) ? "ol" : "ul");
      if (/\d/.test(item[1])) list.setAttribute("start", parseInt(item[1], 10));
      for (; at < lines.length; at += 1) {
        const next = /^\s*(?:[-*+]|\d{1,9}[.)])\s+(.*)$/.exec(lines[at]);
        if (next) list.append(node("li", {}, ...inline(next[1])));
        else if (/^\s{2,}\S/.test(lines[at]) && list.lastChild) list.lastChild.append(" ", ...inline(lines[at].trim()));
        else break;
      }
      found.push(list);
      continue;
    } else if (line.includes("|") && /^\s*\|?\s*:?-{2,}:?\s*(\|\s*:?-{2,}:?\s*)*\|?\s*$/.test(lines[at + 1] ?? "")) {
      flush();
      const cells = (row) => row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
      const table = node("table", {}, node("tr", {}, ...cells(line).map((cell) => node("th", {}, ...cell))));
      for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) {
        table.append(node("tr", {}, ...cells(lines[at]).map((cell) => node("td", {}, ...cell))));
      }
      found.push(table);
      continue;
    } else if (!line.trim()) flush();
    else paragraph.push(line);
    at += 1;
  }
  flush();
  return found;
}

function codeBlock(text) {
  const made = node("div", { class: "copy" }, node("pre", {}, node("code", {}, text)), node("button", { type: "button", "data-copy": "", hidden: "" }, "Copy"));
  return made;
}

// --- what every page can do --------------------------------------------------------------------

function enhance(within) {
  for (const one of all("[data-markdown]", within)) {
    one.replaceChildren(...markdown(one.textContent));
    one.classList.add("is-drawn");
    one.removeAttribute("data-markdown");
  }
  for (const one of all("[data-copy], [data-actions], [data-delete]", within)) one.hidden = false;
  for (const one of all("[data-unfold]", within)) {
    one.addEventListener("toggle", async () => {
      if (!one.open || one.dataset.unfolded) return;
      one.dataset.unfolded = "yes";
      const rows = $("#rows", await fetchPage(one.dataset.unfold).catch(() => document.createElement("div")));
      if (rows) { rows.removeAttribute("id"); one.append(document.adoptNode(rows)); }
    });
  }
}

addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  const pre = $("pre", button.parentElement);
  try { await navigator.clipboard.writeText(pre.textContent); button.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(pre); button.textContent = "Selected"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

for (const filter of all("[data-filter]")) {
  filter.addEventListener("input", () => {
    for (const one of all(filter.dataset.filter)) one.hidden = !one.textContent.toLowerCase().includes(filter.value.toLowerCase());
  });
}

// --- chat --------------------------------------------------------------------------------------

function chat(section) {
  const form = $("[data-composer]", section), field = form.elements.message, answering = $("#answering");
  let agent = section.dataset.agent, running = null, editing = null;
  const turns = Number(section.dataset.turns);

  // What a browser says of a network that failed helps no person.
  const lost = (error) => { throw error.name === "AbortError" ? error : new Error("The server does not answer. Is it running?"); };
  async function call(method, address, body, signal) {
    const response = await fetch(address, { method, headers: { "content-type": "application/json" }, body: body && JSON.stringify(body), signal }).catch(lost);
    if (!response.ok) throw new Error((await response.json()).error?.message ?? response.statusText);
    return response;
  }
  const at = (name) => `/v1/agents/${encodeURIComponent(name)}`;
  const numeric = (name) => (form.elements[name]?.value.trim() ? { [name]: Number(form.elements[name].value) } : {});
  const text = (name, as = name) => (form.elements[name]?.value.trim() ? { [as]: form.elements[name].value.trim() } : {});

  async function send(words) {
    const said = node("div", { class: "message from-user" }, node("span", { class: "role" }, "user"), node("div", { class: "text" }, words));
    const thought = node("div", { class: "text" }), thinking = node("details", { class: "thinking" }, node("summary", {}, "Thinking"), thought);
    const body = node("div", { class: "text" }, "…"), note = node("p", { class: "quiet small" });
    thinking.hidden = true;
    answering.replaceChildren(said, node("div", { class: "message from-model" }, node("span", { class: "role" }, "assistant"), thinking, body), note);
    field.value = "";
    running = new AbortController();
    $("[data-stop]", form).hidden = false;
    $("[data-send]", form).disabled = true;
    let answer = "", thoughts = "", whole = false;
    try {
      if (!agent) {
        const made = await (await call("POST", "/v1/agents", { ...text("agent", "agent_id"), ...text("system", "system_prompt"), ...text("model") })).json();
        agent = made.agent_id;
      }
      const asked = { messages: [{ role: "user", content: words }], stream: true, ...numeric("temperature"), ...numeric("top_p"), ...numeric("max_tokens") };
      const response = await call("POST", `${at(agent)}/generate`, asked, running.signal);
      for await (const piece of pieces(response)) {
        if (piece === "[DONE]") { whole = true; break; }
        const parsed = JSON.parse(piece);
        if (parsed.error) throw new Error(parsed.error.message);
        const delta = parsed.choices?.[0]?.delta ?? {};
        answer += delta.content ?? "";
        thoughts += delta.reasoning_content ?? "";
        body.replaceChildren(...markdown(answer || "…"));
        body.classList.add("is-drawn");
        thinking.hidden = !thoughts;
        thought.textContent = thoughts;
      }
      if (!whole) throw new Error("The answer was cut off: the server may have stopped.");
    } catch (error) {
      note.textContent = error.name === "AbortError" ? "Stopped. This answer is not part of the conversation." : error.message;
      if (error.name !== "AbortError") note.className = "bad";
      if (!answer && !thoughts) answering.replaceChildren(note);
      field.value ||= words;
      field.focus();
    }
    running = null;
    $("[data-stop]", form).hidden = true;
    $("[data-send]", form).disabled = false;
    // The stored turn has its bar and its sentence.
    if (whole) location.replace(`/explorer/chat?agent=${encodeURIComponent(agent)}`);
    else if (agent && agent !== section.dataset.agent) history.replaceState(null, "", `/explorer/chat?agent=${encodeURIComponent(agent)}`);
  }

  async function* pieces(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read().catch(lost);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }

  async function forked(turn, words) {
    const made = await (await call("POST", `${at(agent)}/fork`, { turn })).json();
    if (words) sessionStorage.setItem(`say ${made.agent_id}`, words);
    location.href = `/explorer/chat?agent=${encodeURIComponent(made.agent_id)}`;
  }
  const asked = (turn) => all(`[data-turn="${turn}"] .from-user .text`).at(-1)?.textContent ?? "";

  const failed = (error) => answering.replaceChildren(node("p", { class: "bad", role: "alert" }, error.message));
  function edit(turn) {
    editing = turn;
    $("[data-editing]", form).hidden = !turn;
    if (turn) $("[data-editing] span", form).textContent = `Editing turn ${turn}. Sending begins a fork, and this conversation stays as it is.`;
    field.value = turn ? asked(turn) : "";
    field.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || !field.value.trim()) return;
    if (editing) forked(editing - 1, field.value).catch(failed);
    else send(field.value);
  });
  $("[data-editing] button", form).addEventListener("click", () => edit(null));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  $("[data-stop]", form).addEventListener("click", () => running?.abort());
  section.addEventListener("click", async (event) => {
    const { fork, edit: edited, again } = event.target.dataset ?? {};
    try {
      if (fork) await forked(Number(fork));
      else if (edited) edit(Number(edited));
      else if (again) await forked(Number(again) - 1, asked(again));
      else if ("delete" in (event.target.dataset ?? {})) {
        const button = event.target;
        if (!button.dataset.sure) { button.dataset.sure = "yes"; button.textContent = `Delete ${turns} turns for good?`; return; }
        await call("DELETE", at(agent));
        location.href = "/explorer/chat";
      }
    } catch (error) { failed(error); }
  });
  const kept = sessionStorage.getItem(`say ${agent}`);
  if (kept) {
    sessionStorage.removeItem(`say ${agent}`);
    send(kept);
  }
  scrollTo(0, document.body.scrollHeight);
  field.focus({ preventScroll: true });
}

enhance(document);
follow();
if (where === "live") setInterval(tick, 500);
if (where === "chat") chat($(".chat"));
