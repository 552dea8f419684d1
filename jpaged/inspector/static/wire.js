// Frames -> the pools as they are. jpaged/inspector/frames.py defines the format of a frame.

export const FREE = 0, CACHED = 1, HELD = 2, PINNED = 3, ASIDE = 4, RESERVED = 5;
export const KINDS = ["free", "cached", "held", "pinned", "disabled", "reserved"];

export const kindOf = (cell) => cell & 7;
export const countOf = (cell) => (cell >>> 3) & 255;
export const ownerOf = (cell) => cell >>> 11;
export const OWNER_MASK = (1 << 21) - 1;

class Pool {
  constructor(told) {
    this.cells = new Uint32Array(told.num_blocks + 1);
    this.hostCells = new Uint32Array(told.num_host_blocks + 1);
    this.tables = new Map();   // "number/sequence/kv group/is host" -> block ids
    this.requests = new Map(); // number -> what is told of a request
    this.byOwner = new Map();  // what a cell has of the number -> the request
  }

  // The cells that have changed are returned: null is all.
  take(told, isWhole) {
    this.told = told;
    const changed = isWhole ? null : [];
    apply(this.cells, told.cells, changed);
    apply(this.hostCells, told.host_cells, null);
    for (const [number, sequence, group, isHost, start, ids] of told.tables) {
      const key = `${number}/${sequence}/${group}/${isHost}`;
      const kept = (this.tables.get(key) ?? []).slice(0, start);
      this.tables.set(key, kept.concat(ids));
    }
    this.requests = new Map(told.requests.map((one) => [one.number, one]));
    this.byOwner = new Map(told.requests.map((one) => [one.number & OWNER_MASK, one]));
    const present = new Set();
    for (const one of told.requests) for (const [index] of one.sequences) present.add(`${one.number}/${index}`);
    for (const [key, ids] of this.tables) {
      const [number, sequence] = key.split("/");
      if (!ids.length || !present.has(`${number}/${sequence}`)) this.tables.delete(key);
    }
    return changed;
  }

  // The tables of a request: [{sequence, group, isHost, ids}].
  tablesOf(number) {
    const found = [];
    for (const [key, ids] of this.tables) {
      const [of, sequence, group, isHost] = key.split("/").map(Number);
      if (of === number) found.push({ sequence, group, isHost: isHost === 1, ids });
    }
    return found.sort((a, b) => a.sequence - b.sequence || a.group - b.group);
  }

  // Whose tables hold a block.
  holdersOf(block) {
    const holders = [];
    for (const [key, ids] of this.tables) {
      const [number, sequence, , isHost] = key.split("/").map(Number);
      if (!isHost && ids.includes(block)) holders.push([number, sequence]);
    }
    return holders;
  }

  // How many blocks are of each kind.
  census() {
    const counts = [0, 0, 0, 0, 0, 0];
    for (let block = 1; block < this.cells.length; block++) counts[this.cells[block] & 7]++;
    return counts;
  }
}

export class Pools {
  constructor() {
    this.number = null;
    this.numFrames = 0;
    this.pools = [];
  }

  // Takes a frame: the changed cells of each pool; false when it changes another than the last.
  take(frame) {
    const isWhole = frame.base === null;
    if (!isWhole && frame.base !== this.number) return false;
    const isNew = isWhole && (this.pools.length !== frame.pools.length ||
      this.pools.some((pool, i) => pool.cells.length !== frame.pools[i].num_blocks + 1));
    if (isWhole) {
      if (isNew) this.pools = frame.pools.map((told) => new Pool(told));
      for (const pool of this.pools) { pool.cells.fill(0); pool.hostCells.fill(0); pool.tables.clear(); }
    }
    this.number = frame.number;
    this.numFrames++;
    return frame.pools.map((told, i) => this.pools[i].take(told, isWhole));
  }
}

function apply(cells, runs, changed) {
  if (!runs) return;
  const bytes = Uint8Array.from(atob(runs), (letter) => letter.charCodeAt(0));
  const numbers = new DataView(bytes.buffer);
  for (let at = 0; at < bytes.length; at += 12) {
    const first = numbers.getUint32(at, true), count = numbers.getUint32(at + 4, true);
    cells.fill(numbers.getUint32(at + 8, true), first, first + count);
    if (changed) for (let block = first; block < first + count; block++) changed.push(block);
  }
}

// Resolves once the tab is shown.
function shown() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
  });
}

// Reads server-sent events of a path for ever: `take` gets the data of each, `tell` whether there is a connection.
// A hidden tab has none: browsers allow six for all tabs of a server, and a seventh tab would wait.
export async function follow(path, headers, take, tell) {
  for (;;) {
    await shown();
    const controller = new AbortController();
    const leave = () => { if (document.hidden) controller.abort(); };
    document.addEventListener("visibilitychange", leave);
    try {
      const answer = await fetch(path, { headers: headers(), cache: "no-store", signal: controller.signal });
      if (!answer.ok) throw new Error((await answer.json()).error?.message ?? answer.statusText);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      tell(true, "");
      for await (const data of events(reader)) take(data);
      tell(false, "the server closed the stream");
    } catch (error) {
      tell(false, controller.signal.aborted ? "paused: the tab is hidden" : String(error.message ?? error));
    } finally {
      document.removeEventListener("visibilitychange", leave);
    }
    if (controller.signal.aborted) continue;
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

// The data of server-sent events, each whole.
export async function* events(reader) {
  let parts = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    parts.push(value);
    if (!value.includes("\n")) continue;
    const messages = parts.join("").split("\n\n");
    parts = [messages.pop()];
    for (const message of messages) {
      const data = message.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
