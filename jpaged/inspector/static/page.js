// Ties the page together: frames come, cells are painted, who is pointed at is followed.

import { HELD, KINDS, Pools, countOf, follow, kindOf, ownerOf } from "./wire.js";
import { css, colourOf, setDark } from "./colours.js";
import { Grid } from "./grid.js";
import { Log, Queue, Rates, showFigures, showTables, shortName, text } from "./view.js";
import { Play } from "./play.js";

const $ = (id) => document.getElementById(id);
const FLASHES = { fork: "#b48cf7", copy_on_write: "#ffd866", prefix_copy: "#ffd866", swap_out: "#58a6ff", swap_in: "#58a6ff" };
const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;

export const pools = new Pools();
export const grid = new Grid($("cells"), $("over"));
export const hostGrid = new Grid($("host-cells"), $("host-over"), 22);
const rates = new Rates(), log = new Log($("log"));
let place = 0;          // of the replica that is shown
let pointedAt = null;   // the number of a request, while it is pointed at
let kept = null;        // the same after a click
let play = null;
let isAllStale = true;  // everything has to be painted
let stale = [];         // cells to paint
let isListStale = false;

const queue = new Queue($("queue"), (number, isKept) => {
  if (isKept) kept = kept === number ? null : number;
  pointedAt = number;
  refollow();
});

const pool = () => pools.pools[place];
const followed = () => pointedAt ?? kept;

function refollow() {
  if (!pool()) return;
  let number = followed();
  if (number !== null && !pool().requests.has(number)) {
    if (kept === number) kept = null;
    number = null;
  }
  const tables = number === null ? [] : pool().tablesOf(number);
  grid.follow(tables.some((table) => !table.isHost) ? number : null, tables);
  showTables(pool(), number);
}

function take(data) {
  const changed = pools.take(JSON.parse(data));
  if (changed === false) return;
  place = Math.min(place, pools.pools.length - 1);
  rates.take(pools.pools);
  pools.pools.forEach((one, i) => {
    const fresh = log.take(one, i);
    if (i === place && !isStill) for (const [, kind, , , blocks] of fresh) flash(kind, blocks);
  });
  if (changed[place] === null) isAllStale = true;
  else stale = stale.concat(changed[place]);
  isListStale = true;
  document.body.dataset.frames = pools.numFrames;
}

function flash(kind, blocks) {
  const colour = FLASHES[kind];
  if (!colour) return;
  if (kind === "fork") blocks.forEach((block) => grid.flash(block, colour));
  else if (kind === "swap_out") blocks.forEach((block, i) => i % 2 === 0 && grid.flash(block, colour));
  else blocks.forEach((block, i) => i % 2 === 1 && grid.flash(block, colour));
}

function offerReplicas() {
  const list = $("replicas");
  if (list.children.length === pools.pools.length || pools.pools.length < 2) return;
  list.replaceChildren(...pools.pools.map((_, i) => {
    const button = document.createElement("button");
    button.type = "button"; button.textContent = `replica ${i}`;
    button.setAttribute("role", "tab");
    button.setAttribute("aria-selected", String(i === place));
    button.addEventListener("click", () => {
      place = i; isAllStale = isListStale = true; kept = pointedAt = null;
      for (const other of list.children) other.setAttribute("aria-selected", String(other === button));
    });
    return button;
  }));
}

// Once for each frame of the screen: what has come since is painted together.
function draw(now) {
  requestAnimationFrame(draw);
  const shown = pool();
  if (!shown) return;
  if (isAllStale || stale.length) {
    grid.paint(shown.cells, isAllStale ? null : stale);
    text("hidden", grid.hidden ? `${grid.hidden} more blocks are disabled` : "");
  }
  if (isListStale) {
    const used = shown.hostCells.some((cell) => kindOf(cell) !== 0);
    if ($("host").hidden === used) { $("host").hidden = !used; isAllStale = true; grid.paint(shown.cells, null); }
    if (used) {
      const held = shown.hostCells.reduce((sum, cell) => sum + (kindOf(cell) === HELD), 0);
      const cached = shown.hostCells.reduce((sum, cell) => sum + (kindOf(cell) === 1), 0);
      text("host-use", `${held} blocks of swapped requests, ${cached} of cached prefixes, of ${shown.told.num_host_blocks}`);
      hostGrid.paint(clipped(shown.hostCells), null);
      hostGrid.draw(now);
    }
    queue.show(shown, followed());
    showFigures(shown, pools.pools, rates);
    offerReplicas();
    play?.offer(shown.told.num_blocks, shown.told.limit);
    refollow();
    if (grid.pointed) showTip(grid.pointed);
    isListStale = false;
  }
  isAllStale = false;
  stale = [];
  grid.draw(now);
  document.body.dataset.drawn = pools.numFrames;
}

// Host memory as far as it is used: most of it seldom is.
function clipped(cells) {
  let last = cells.length - 1;
  while (last > 1 && kindOf(cells[last]) === 0) last--;
  return cells.subarray(0, Math.min(cells.length, Math.max(last + 1, 129)));
}

function showTip(block) {
  const tip = $("tip"), cell = pool()?.cells[block];
  if (!block || cell === undefined) { tip.hidden = true; return; }
  const kind = kindOf(cell), count = countOf(cell);
  let words = `block ${block}: ${KINDS[kind]}`;
  if (kind === HELD) {
    const holders = pool().holdersOf(block), byRequest = new Map();
    for (const [number, sequence] of holders) byRequest.set(number, [...(byRequest.get(number) ?? []), sequence]);
    words += ` by ${count} table${count > 1 ? "s" : ""}`;
    for (const [number, sequences] of [...byRequest].slice(0, 6)) {
      const one = pool().requests.get(number);
      words += `\n#${number} ${one ? shortName(one) : ""} · sequence${sequences.length > 1 ? "s" : ""} ${sequences.join(", ")}`;
    }
  }
  if (tip.textContent !== words) tip.textContent = words;
  tip.hidden = false;
  const [x, y] = grid.middle(block), width = $("stage").clientWidth;
  const left = x / grid.scale + 14, isLeft = left + 240 > width;
  tip.style.left = isLeft ? "" : `${left}px`;
  tip.style.right = isLeft ? `${width - x / grid.scale + 14}px` : "";
  tip.style.top = `${Math.max(0, y / grid.scale - 10)}px`;
}

function pointAt(block) {
  grid.point(block);
  showTip(block);
  const cell = pool()?.cells[block] ?? 0;
  const one = kindOf(cell) === HELD ? pool().byOwner.get(ownerOf(cell)) : undefined;
  const number = one?.number ?? null;
  if (number !== pointedAt) { pointedAt = number; refollow(); isListStale = true; }
}

$("over").addEventListener("pointermove", (event) => pointAt(grid.blockAt(event)));
$("over").addEventListener("pointerleave", () => pointAt(0));
$("over").addEventListener("click", (event) => {
  pointAt(grid.blockAt(event));
  kept = kept === pointedAt ? null : pointedAt;
  refollow();
});
$("over").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns }[event.key];
  if (event.key === "Escape") { kept = null; pointAt(0); }
  if (!step) return;
  event.preventDefault();
  pointAt(Math.max(1, Math.min(grid.shown, (grid.pointed || 1) + step)));
});
$("over").addEventListener("blur", () => pointAt(0));
new ResizeObserver(() => { isAllStale = isListStale = true; }).observe($("stage"));

function shade(dark) {
  document.documentElement.classList.toggle("light", !dark);
  setDark(dark);
  isAllStale = isListStale = true;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}
const asked = localStorage.getItem("jpaged-theme");
const lightness = matchMedia("(prefers-color-scheme: light)");
shade(asked ? asked === "dark" : !lightness.matches);
lightness.addEventListener("change", () => { if (!localStorage.getItem("jpaged-theme")) shade(!lightness.matches); });
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.classList.contains("light");
  localStorage.setItem("jpaged-theme", dark ? "dark" : "light");
  shade(dark);
});

setInterval(() => { rates.draw($("spark")); text("rate", Math.round(rates.now)); }, 200);

const ownerOfId = (id) => {
  for (const one of pool()?.requests.values() ?? []) if (shortName(one) === id) return one.number;
  return null;
};

async function begin() {
  for (;;) {
    try {
      const answer = await fetch("page/about");
      if (!answer.ok) throw new Error((await answer.json()).error?.message ?? answer.statusText);
      const about = await answer.json();
      text("model", `${about.model} · ${about.version}`);
      play = new Play(about, ownerOfId);
      break;
    } catch (error) {
      text("link", String(error.message ?? error));
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  follow("page/events", () => play.headers(), take, (isUp, why) => {
    $("link").className = `link ${isUp ? "up" : "down"}`;
    text("link", isUp ? "live" : why);
  });
}

requestAnimationFrame(draw);
begin();
