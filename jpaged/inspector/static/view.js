// What is beside the cells: figures, lists, tables, what happens.

import { CACHED, HELD, KINDS, PINNED, ASIDE, countOf, kindOf } from "./wire.js";
import { colourOf, css, isDark } from "./colours.js";

const $ = (id) => document.getElementById(id);
const MOST_LINES = 80, MOST_ROWS = 16, MOST_BLOCKS = 64, MOST_LISTED = 120;
const MINUTE = 60;

const blocks = (count) => `${count} block${count === 1 ? "" : "s"}`;
const SAYS = {
  admission: ["admitted", (who) => who],
  resumption: ["resumed", (who) => `${who}, recomputed from its first token`],
  fork: ["forked", (who, count) => `${who}: ${count} more share its blocks`],
  copy_on_write: ["copied on write", (who, count, [from, to]) => `${from} → ${to}`],
  prefix_copy: ["prefix copied", (who, count, [from, to]) => `${from} → ${to}`],
  eviction: ["evicted", (who, count) => `${count} cached, offloaded to host memory`],
  prefix_in: ["loaded", (who, count) => `${count} cached, from host memory`],
  prefix_out: ["offloaded", (who, count) => `${count} cached, to disk or another server`],
  swap_out: ["swapped out", (who, count) => `${blocks(count)} to host memory`],
  swap_in: ["swapped in", (who, count) => `${blocks(count)} from host memory`],
  preemption_swap: ["preempted", (who) => `${who}: blocks swapped to host memory`],
  preemption_recompute: ["preempted", (who) => `${who}: will be recomputed`],
  end: ["finished", (who, count, blocks, why) => `${who}: ${why}`],
};

export const shortName = (one) => one.id.replace(/^\d+\//, "");
export const text = (id, value) => { const at = $(id); value = String(value); if (at.textContent !== value) at.textContent = value; };

// Figures over time: tokens a second from counts that only rise.
export class Rates {
  constructor() {
    this.points = []; // [seconds of this page's clock, tokens a second]
    this.last = null;
  }

  take(pools) {
    const now = performance.now() / 1000;
    const tokens = pools.reduce((sum, pool) => sum + pool.told.totals.num_generation_tokens, 0);
    const at = pools[0].told.time_s;
    if (this.last && at > this.last.at && tokens >= this.last.tokens) {
      if (at - this.last.at < 0.08) return;
      this.points.push([now, (tokens - this.last.tokens) / (at - this.last.at)]);
    }
    this.last = { at, tokens };
    while (this.points.length && this.points[0][0] < now - MINUTE - 2) this.points.shift();
  }

  // The mean of the last second.
  get now() {
    const since = performance.now() / 1000 - 1.2, recent = this.points.filter(([at]) => at > since);
    return recent.length ? recent.reduce((sum, [, rate]) => sum + rate, 0) / recent.length : 0;
  }

  draw(canvas) {
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth * scale, height = canvas.clientHeight * scale;
    if (canvas.width !== width) { canvas.width = width; canvas.height = height; }
    const context = canvas.getContext("2d"), now = performance.now() / 1000;
    context.clearRect(0, 0, width, height);
    const most = Math.max(10, ...this.points.map(([, rate]) => rate));
    const style = getComputedStyle(document.documentElement).getPropertyValue("--accent");
    context.strokeStyle = context.fillStyle = style;
    context.lineWidth = 1.5 * scale;
    context.beginPath();
    this.points.forEach(([at, rate], i) => {
      const x = width * (1 - (now - at) / MINUTE), y = height - 2 - (height - 4) * (rate / most);
      if (i) context.lineTo(x, y); else context.moveTo(x, y);
    });
    context.stroke();
    if (this.points.length) {
      context.lineTo(width * (1 - (now - this.points[this.points.length - 1][0]) / MINUTE), height);
      context.lineTo(width * (1 - (now - this.points[0][0]) / MINUTE), height);
      context.globalAlpha = 0.15; context.fill(); context.globalAlpha = 1;
    }
  }
}

export function showFigures(pool, pools, rates) {
  const census = pool.census(), { told } = pool, total = told.num_blocks;
  const usable = Math.max(1, total - census[ASIDE]);
  text("rate", Math.round(rates.now));
  text("held", census[HELD] + census[PINNED]);
  text("limit", told.limit);
  const share = (count) => `${(100 * count) / usable}%`;
  const [held, pinned, cached] = document.querySelectorAll("#bar i");
  held.style.width = share(census[HELD]); pinned.style.width = share(census[PINNED]);
  cached.style.width = share(census[CACHED]);
  let references = 0;
  for (let block = 1; block < pool.cells.length; block++) {
    if (kindOf(pool.cells[block]) === HELD) references += countOf(pool.cells[block]);
  }
  const saved = references - census[HELD];
  text("saved", saved > 0 ? `· sharing saves ${saved}` : "");
  $("bar").setAttribute("aria-label", `${census[HELD]} blocks in use, ${census[CACHED]} cached, of ${told.limit}`);
  $("cells").setAttribute("aria-label", `a pool of ${total} blocks: ` + KINDS.map((kind, i) => `${census[i]} ${kind}`).join(", "));
  const { totals } = told;
  text("t-forks", totals.num_forks);
  text("t-copies", totals.num_copies_on_write);
  text("t-preemptions", totals.num_preemptions);
  text("t-swaps", `${totals.num_blocks_swapped_out} / ${totals.num_blocks_swapped_in}`);
  const asked = totals.num_prefix_query_tokens;
  text("t-hits", asked ? `${Math.round((100 * totals.num_prefix_hit_tokens) / asked)}%` : "–");
}

// The list of requests: buttons that are kept while their request is there. Asks `pick` who is pointed at.
export class Queue {
  constructor(list, pick) {
    this.list = list;
    this.items = new Map();
    this.pick = pick;
  }

  show(pool, picked) {
    const order = { running: 0, finished: 0, swapped: 1, waiting: 2 };
    const all = [...pool.requests.values()].sort((a, b) => order[a.status] - order[b.status] || a.number - b.number);
    const listed = all.slice(0, MOST_LISTED), kept = new Set(listed.map((one) => one.number));
    for (const [number, item] of this.items) if (!kept.has(number)) { item.remove(); this.items.delete(number); }
    listed.forEach((one, place) => {
      let item = this.items.get(one.number);
      if (!item) { item = this.make(one); this.items.set(one.number, item); }
      if (this.list.children[place] !== item) this.list.insertBefore(item, this.list.children[place] ?? null);
      const button = item.firstChild;
      button.className = `${one.status}${picked === one.number ? " on" : ""}`;
      const tokens = one.sequences.reduce((sum, [, count]) => sum + count - one.prompt, 0);
      const several = one.sequences.length > 1 ? `${one.sequences.length} x ` : "";
      const facts = one.status === "waiting" ? "waiting" : `${several}${one.prompt}+${Math.max(0, tokens)}`;
      const again = one.preemptions ? ` · preempted ${one.preemptions}x` : "";
      const shown = `${one.status === "swapped" ? "swapped · " : ""}${facts}${again}`;
      if (button.lastChild.textContent !== shown) button.lastChild.textContent = shown;
      const colour = css(colourOf(one.number, 2));
      if (button.firstChild.style.background !== colour) button.firstChild.style.background = colour;
    });
    const running = all.filter((one) => one.status === "running").length;
    text("num-running", running);
    text("num-swapped", all.filter((one) => one.status === "swapped").length);
    text("num-waiting", pool.told.num_waiting);
  }

  make(one) {
    const item = document.createElement("li"), button = document.createElement("button");
    const swatch = document.createElement("i"), name = document.createElement("span"), facts = document.createElement("span");
    button.type = "button";
    name.className = "name"; facts.className = "facts";
    name.textContent = `#${one.number} ${shortName(one)}`;
    button.append(swatch, name, facts);
    item.append(button);
    item.dataset.number = one.number;
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => this.pick(one.number, false));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => this.pick(null, false));
    button.addEventListener("click", () => this.pick(one.number, true));
    return item;
  }
}

// The block tables of one request: logical block over physical block, as far as it is filled.
export function showTables(pool, number) {
  const one = number === null ? undefined : pool.requests.get(number), rows = $("tables"), title = $("tables-title");
  if (!one) {
    if (rows.firstChild) {
      rows.replaceChildren();
      title.innerHTML = "Block table <small>point at a request or at one of its blocks</small>";
    }
    return;
  }
  const tables = pool.tablesOf(number), lens = new Map(one.sequences), size = pool.told.block_size;
  const made = tables.slice(0, MOST_ROWS).map(({ sequence, group, isHost, ids }) => {
    const row = document.createElement("div"), name = document.createElement("span");
    row.className = "row";
    const groups = pool.told.num_kv_groups > 1 ? ` · layers ${group}` : "";
    name.textContent = `${isHost ? "host · " : ""}sequence ${sequence}${groups}`;
    row.append(name);
    const first = Math.max(0, ids.length - MOST_BLOCKS);
    if (first) row.append(more(`${first} earlier …`));
    ids.slice(first).forEach((id, i) => row.append(blockOf(pool, number, id, first + i, isHost, (lens.get(sequence) ?? 0) / size)));
    return row;
  });
  if (tables.length > MOST_ROWS) made.push(more(`and ${tables.length - MOST_ROWS} more sequences`));
  rows.replaceChildren(...made);
  title.innerHTML = "Block table <small></small>";
  title.lastChild.textContent = `of #${number} ${shortName(one)}: logical above, physical below; ${size} tokens each`;
}

function blockOf(pool, number, id, place, isHost, filled) {
  const block = document.createElement("div"), logical = document.createElement("small"), count = document.createElement("em");
  block.className = "block";
  logical.textContent = place;
  block.append(logical, String(id || "·"));
  const tables = isHost ? countOf(pool.hostCells[id] ?? 0) : countOf(pool.cells[id] ?? 0);
  if (!id) { block.classList.add("gone"); return block; }
  if (tables > 1) { count.textContent = `×${tables}`; block.append(count); }
  const part = Math.max(0, Math.min(1, filled - place)), colour = css(colourOf(number, tables)), pale = css(colourOf(number, tables), 0.35);
  block.style.background = `linear-gradient(90deg, ${colour} ${100 * part}%, ${pale} ${100 * part}%)`;
  block.classList.toggle("pale", isDark ? tables > 2 : tables < 3);
  return block;
}

function more(words) {
  const at = document.createElement("span");
  at.className = "more";
  at.textContent = words;
  return at;
}

// What happens, the newest first.
export class Log {
  constructor(list) {
    this.list = list;
    this.seen = new Map();
    this.names = new Map();
    this.begun = performance.now();
  }

  // Takes what has happened in one pool; returns what was not told before.
  take(pool, place) {
    for (const one of pool.requests.values()) this.names.set(`${place}/${one.number}`, `#${one.number} ${shortName(one)}`);
    if (this.names.size > 4000) this.names = new Map([...this.names].slice(-2000));
    let last = this.seen.get(place) ?? 0;
    const fresh = pool.told.happenings.filter(([number]) => number > last);
    for (const [number] of fresh) last = Math.max(last, number);
    this.seen.set(place, last);
    for (const [, kind, request, count, blocks, why] of fresh.slice(-MOST_LINES)) {
      if (kind === "admission") this.names.set(`${place}/${request}`, `#${request} ${shortName({ id: why })}`);
      const [name, says] = SAYS[kind] ?? [kind, () => ""];
      const who = request === null ? "" : this.names.get(`${place}/${request}`) ?? `#${request}`;
      this.add(kind, name, says(who, count, blocks, why));
    }
    return fresh;
  }

  add(kind, name, rest) {
    const item = document.createElement("li"), at = document.createElement("time");
    const what = document.createElement("b"), more = document.createElement("span");
    at.textContent = `${((performance.now() - this.begun) / 1000).toFixed(1)}`;
    what.textContent = name;
    more.textContent = rest; more.className = "rest"; more.title = rest;
    item.className = `k-${kind}`;
    item.append(at, what, more);
    this.list.prepend(item);
    while (this.list.children.length > MOST_LINES) this.list.lastChild.remove();
  }
}
