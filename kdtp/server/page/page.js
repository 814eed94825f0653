// Looks at the server once a second, and at one request's rounds as they come. It asks for nothing but figures.

import {bars, html, shares} from "/page/svg.js";
import {draw} from "/page/tree.js";

const $ = (id) => document.getElementById(id);
const WINDOW = 30;  // looks over which rates are taken
const PAUSE = 150;  // milliseconds between two trees: eyes are slower than rounds
let key = "";  // in memory alone
let looks = [];
let next;  // the timer of the next look
let watching = null;  // {id, choice, stop}
let newest = null, drawn = 0, paused = false, said = [];

async function ask(path, signal) {
  const headers = key ? {Authorization: `Bearer ${key}`} : {};
  const response = await fetch(path, {headers, signal, cache: "no-store"});
  if (response.status === 401) throw new Refused();
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response;
}

class Refused extends Error {}

// ---------------------------------------------------------------- once a second

async function look() {
  clearTimeout(next);  // a key was given while one was due
  let wait = 1000;
  try {
    const status = await (await ask("/v1/status")).json();
    const requests = (await (await ask("/v1/requests")).json()).data;
    $("door").hidden = true;
    document.querySelector("main").hidden = false;
    show({...status, at: performance.now() / 1000});
    list(requests);
  } catch (error) {
    if (error instanceof Refused) return lock();
    state("unreachable", error.message);
    wait = 3000;
  }
  clearTimeout(next);
  next = setTimeout(look, wait);
}

function lock() {
  $("door").hidden = false;
  document.querySelector("main").hidden = true;
  $("refused").textContent = key ? "This key is not one of the server's." : "";
  state("locked", "");
  $("key").focus();
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  $("key").value = "";
  look();
});

function state(name, reason) {
  $("state").textContent = name;
  $("state").className = `badge ${name}`;
  $("reason").textContent = reason;
}

function show(now) {
  const first = looks[looks.length - 1];
  if (first && (now.steps ?? 0) < (first.steps ?? 0)) looks = [];  // another engine counts anew
  looks = [...looks, now].slice(-WINDOW);
  state(now.state, now.reason);
  $("model").textContent = `${now.model}, tp ${now.tp}, drafter ${now.drafter.name}`;
  $("loading").hidden = now.state !== "loading" && now.state !== "restarting";
  $("progress").max = now.progress.total || 1;
  $("progress").value = now.progress.done;
  $("amount").textContent = `${bytes(now.progress.done)} of ${bytes(now.progress.total)}`;
  if (now.steps === undefined) return;
  figures(now);
}

function bytes(count) {
  return count >= 1e9 ? `${(count / 1e9).toFixed(2)} GB` : `${(count / 1e6).toFixed(2)} MB`;
}

function figures(now) {
  const then = looks.find((look) => look.steps !== undefined), near = looks[Math.max(0, looks.length - 6)];
  const accepted = now.accepted.map((count, i) => count - (then === now ? 0 : then.accepted[i] ?? 0));
  const rounds = accepted.reduce((a, b) => a + b, 0);
  const taken = accepted.reduce((sum, count, i) => sum + i * count, 0);
  const seconds = now.at - near.at, steps = now.steps - (then === now ? 0 : then.steps);
  const used = now.pages.total - now.pages.free;
  const tiles = [
    [now.running, "running"], [now.waiting, "waiting"],
    [seconds ? ((now.generation_tokens - near.generation_tokens) / seconds).toFixed(1) : "–", "tokens / s"],
    [rounds ? (1 + taken / rounds).toFixed(2) : "–", "tokens / round"],
    [`${Math.round(100 * used / Math.max(now.pages.total, 1))}%`, "KV pages in use"],
    [now.restarts, "restarts"],
  ];
  $("tiles").replaceChildren(...tiles.map(([value, name]) => html("div", {class: "tile"},
    html("b", {}, String(value)), html("span", {}, name))));
  if (rounds) bars($("accepted"), accepted);
  if (steps > 0) {
    const stages = Object.entries(now.stage_ms).map(([name, ms]) =>
      [name, Math.max(0, ms - (then === now ? 0 : then.stage_ms[name] ?? 0)) / steps]);
    shares($("stages"), $("legend"), Object.fromEntries(stages), "ms / step");
  }
}

function list(requests) {
  $("none").hidden = requests.length > 0;
  $("requests").replaceChildren(...requests.slice(0, 100).map((request) => {
    const chosen = watching && watching.id === request.id && watching.choice === request.choice;
    const name = request.choice ? `${request.id} #${request.choice}` : request.id;
    const button = html("button", {type: "button", "aria-pressed": String(Boolean(chosen))}, name);
    button.addEventListener("click", () => watch(request.id, request.choice, name));
    const depths = request.drafted_by_depth.slice(0, 8).map((drafted, i) =>
      `${Math.round(100 * request.accepted_by_depth[i] / drafted)}%`).join(" ");
    return html("tr", {}, html("td", {}, button), ...[request.prompt_tokens, request.cached_tokens,
      request.completion_tokens, request.max_tokens, `${request.age.toFixed(1)} s`,
      request.rounds ? request.tokens_per_round.toFixed(2) : "–", depths].map((value) => html("td", {}, String(value))));
  }));
}

// ---------------------------------------------------------------- one request's rounds

async function watch(id, choice, name) {
  if (watching) watching.stop.abort();
  const mine = watching = {id, choice, stop: new AbortController()};
  newest = null;
  said = [];
  $("watch").hidden = false;
  $("watched").textContent = name;
  $("about").textContent = "waiting for its next round";
  $("said").replaceChildren();
  $("tree").replaceChildren();
  try {
    const path = `/v1/requests/${encodeURIComponent(id)}/${choice}/rounds`;
    const response = await ask(path, mine.stop.signal);
    for await (const event of events(response.body)) {
      if (mine !== watching) return;
      if (event.ended) $("about").textContent += "; the request has ended";
      else take(event);
    }
  } catch (error) {
    if (mine === watching) $("about").textContent = `no more to see: ${error.message}`;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

function take(round) {
  const texts = [...round.path.slice(1).map((node) => round.nodes[node].text), round.bonus ? round.bonus.text : ""];
  said = [...said, texts.join("")].slice(-200);
  const waits = newest !== null;
  newest = round;
  if (!waits) setTimeout(paint, Math.max(0, drawn + PAUSE - performance.now()));
}

function paint() {
  const round = newest;
  newest = null;
  drawn = performance.now();
  if (!round || paused) return;
  draw($("tree"), round);
  const ms = Object.entries(round.timings_ms).map(([stage, value]) => `${stage} ${value.toFixed(2)}`).join(", ");
  $("about").textContent = `round ${round.number}, token ${round.position}: ${round.nodes.length - 1} drafted, ` +
    `${round.path.length - 1} accepted; step ${ms} ms`;
  $("said").replaceChildren(said.slice(0, -1).join(""), html("mark", {}, said[said.length - 1]));
  $("said").scrollTop = $("said").scrollHeight;
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
});

look();
