// Draws blocks as cells. Below: every cell as pixels, of which only those that have changed are painted again. Above:
// what comes and goes, flashes, the tables that are followed, counts.

import { ASIDE, CACHED, HELD, RESERVED, countOf, kindOf, ownerOf } from "./wire.js";
import { colourOf, css, hueOf, isDark, pixelOf } from "./colours.js";

const MOST_PIXELS = 62;        // a cell is no larger, in CSS pixels
const MOST_SEGMENTS = 3000;    // of the lines through a table
const FLASH_MS = 1400;

export class Grid {
  constructor(below, above, mostPixels = MOST_PIXELS) {
    this.below = below;
    this.above = above;
    this.mostPixels = mostPixels;
    this.cells = new Uint32Array(1);
    this.size = 1; this.columns = 1; this.rows = 1; this.shown = 0;
    this.flashes = new Map(); // block -> {colour, since}
    this.following = null;    // {number, tables}
    this.pointed = 0;         // a block
    this.isStale = true;
    this.asksAgain = false;
  }

  // Fits so many cells into the canvas; true when they are laid out anew.
  fit(numBlocks) {
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(this.below.clientWidth * scale));
    const height = Math.max(1, Math.round(this.below.clientHeight * scale));
    const isSame = this.below.width === width && this.below.height === height && this.shown === numBlocks;
    if (isSame && this.image) return false;
    this.below.width = this.above.width = width;
    this.below.height = this.above.height = height;
    this.scale = scale;
    this.shown = numBlocks;
    let size = Math.min(Math.floor(this.mostPixels * scale), Math.ceil(Math.sqrt((width * height) / Math.max(1, numBlocks))) + 1);
    while (size > 1 && Math.floor(width / size) * Math.floor(height / size) < numBlocks) size--;
    this.size = Math.max(1, size);
    this.columns = Math.max(1, Math.floor(width / this.size));
    this.rows = Math.ceil(numBlocks / this.columns);
    this.left = Math.floor((width - Math.min(this.columns, numBlocks) * this.size) / 2);
    this.gap = this.size >= 12 ? Math.max(2, Math.round(this.size * 0.1)) : this.size >= 3 ? 1 : 0;
    this.image = this.below.getContext("2d").createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    return true;
  }

  // Paints the cells that have changed; null is all.
  paint(cells, changed) {
    let shown = cells.length - 1;
    while (shown > 1 && kindOf(cells[shown]) === ASIDE) shown--; // those at the end need no room
    this.hidden = cells.length - 1 - shown;
    const isNew = this.fit(shown);
    this.cells = cells;
    if (isNew || changed === null) {
      this.pixels.fill(0);
      for (let block = 1; block <= this.shown; block++) this.paintOne(block);
      this.below.getContext("2d").putImageData(this.image, 0, 0);
    } else if (changed.length) {
      let top = Infinity, bottom = -1;
      for (const block of changed) {
        if (block > this.shown) continue;
        this.paintOne(block);
        const row = Math.floor((block - 1) / this.columns);
        top = Math.min(top, row); bottom = Math.max(bottom, row);
      }
      if (bottom >= 0) {
        const y = top * this.size, height = (bottom - top + 1) * this.size;
        this.below.getContext("2d").putImageData(this.image, 0, 0, 0, y, this.below.width, height);
      }
    }
    this.isStale = true;
  }

  paintOne(block) {
    const { size, gap, pixels, columns } = this, width = this.below.width, cell = this.cells[block];
    const column = (block - 1) % columns, row = (block - 1 - column) / columns;
    const x = this.left + column * size, y = row * size, side = size - gap;
    const pixel = pixelOf(cell), kind = kindOf(cell), isRound = side >= 7;
    const isHollow = side >= 5 && kind === CACHED, isHatched = side >= 5 && (kind === ASIDE || kind === RESERVED);
    const edge = Math.max(1, Math.round(side * 0.16));
    for (let dy = 0; dy < side; dy++) {
      const from = (y + dy) * width + x;
      const cut = isRound && (dy === 0 || dy === side - 1) ? (side >= 16 ? 2 : 1) : side >= 16 && (dy === 1 || dy === side - 2) ? 1 : 0;
      if (isHatched) {
        const period = Math.max(4, Math.round(side / 3));
        for (let dx = 0; dx < side; dx++) pixels[from + dx] = (dx + dy) % period < period / 3 ? pixel : 0;
      } else if (isHollow && dy >= edge && dy < side - edge) {
        pixels.fill(pixel, from, from + edge);
        pixels.fill((pixel & 0x00ffffff) | 0x38000000, from + edge, from + side - edge);
        pixels.fill(pixel, from + side - edge, from + side);
      } else {
        pixels.fill(pixel, from + cut, from + side - cut);
        if (cut) { pixels.fill(0, from, from + cut); pixels.fill(0, from + side - cut, from + side); }
      }
    }
  }

  blockAt(event) {
    const box = this.below.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) * this.scale - this.left) / this.size);
    const row = Math.floor(((event.clientY - box.top) * this.scale) / this.size);
    const block = row * this.columns + column + 1;
    return column >= 0 && column < this.columns && row >= 0 && block <= this.shown ? block : 0;
  }

  // The middle of a block's cell, in pixels of the canvas.
  middle(block) {
    const column = (block - 1) % this.columns, row = Math.floor((block - 1) / this.columns);
    const half = (this.size - this.gap) / 2;
    return [this.left + column * this.size + half, row * this.size + half];
  }

  flash(block, colour) {
    if (block < 1 || block > this.shown || this.flashes.size > 3000) return;
    this.flashes.set(block, { colour, since: performance.now() });
    this.isStale = true;
  }

  follow(number, tables) {
    this.following = number === null ? null : { number, tables };
    this.isStale = true;
  }

  point(block) {
    if (block !== this.pointed) { this.pointed = block; this.isStale = true; }
  }

  // Draws what comes and goes, where there is something new; called at every frame of the screen.
  draw(now) {
    if (!this.isStale && !this.flashes.size) return;
    this.isStale = false;
    const context = this.above.getContext("2d");
    context.clearRect(0, 0, this.above.width, this.above.height);
    if (this.following) this.drawFollowed(context);
    this.drawFlashes(context, now);
    this.drawCounts(context);
    if (this.pointed) this.outline(context, this.pointed, isDark ? "#fff" : "#000", Math.max(1.5, this.scale * 1.5));
  }

  drawFlashes(context, now) {
    for (const [block, { colour, since }] of this.flashes) {
      const age = (now - since) / FLASH_MS;
      if (age >= 1 || block > this.shown) { this.flashes.delete(block); continue; }
      const [x, y] = this.middle(block), grown = (this.size - this.gap) / 2 + 1 + (1 - age) ** 2 * Math.min(7 * this.scale, Math.max(3, this.size * 0.3));
      context.globalAlpha = (1 - age) ** 1.5;
      context.strokeStyle = colour;
      context.lineWidth = Math.max(1.5, Math.min(2.5 * this.scale, this.size * 0.14));
      context.strokeRect(x - grown, y - grown, 2 * grown, 2 * grown);
      context.globalAlpha = (1 - age) ** 2 * 0.45;
      context.fillStyle = colour;
      context.fillRect(x - this.size / 2, y - this.size / 2, this.size - this.gap, this.size - this.gap);
    }
    context.globalAlpha = 1;
  }

  drawCounts(context) {
    const side = this.size / this.scale;
    if (side < 17) return;
    context.textAlign = "center";
    context.textBaseline = "middle";
    if (side >= 30) this.drawNumbers(context);
    context.font = `600 ${Math.round(this.size * 0.34)}px system-ui, sans-serif`;
    for (let block = 1; block <= this.shown; block++) {
      const cell = this.cells[block], count = countOf(cell);
      if (kindOf(cell) !== HELD || count < 2) continue;
      if (this.following && !this.followed?.has(block)) continue;
      const [x, y] = this.middle(block);
      context.fillStyle = isDark ? "rgb(8 12 20 / 0.85)" : "rgb(255 255 255 / 0.95)";
      context.fillText(count > 254 ? "∞" : `×${count}`, x, y + this.size * (side >= 30 ? 0.08 : 0.03));
    }
  }

  // The number of each block in its corner, where there is room.
  drawNumbers(context) {
    context.font = `500 ${Math.round(Math.min(11 * this.scale, this.size * 0.24))}px system-ui, sans-serif`;
    for (let block = 1; block <= this.shown; block++) {
      const kind = kindOf(this.cells[block]);
      if (kind === ASIDE || (this.following && !this.followed?.has(block))) continue;
      const [x, y] = this.middle(block), isHeld = kind === HELD, up = this.size * 0.29;
      const isBright = isHeld && (isDark ? countOf(this.cells[block]) > 2 : countOf(this.cells[block]) < 3);
      context.fillStyle = !isHeld ? (isDark ? "rgb(120 135 160 / 0.55)" : "rgb(90 105 130 / 0.6)") : isBright ? "rgb(8 12 20 / 0.7)" : "rgb(255 255 255 / 0.8)";
      context.fillText(String(block), x, isHeld && countOf(this.cells[block]) > 1 ? y - up : y);
    }
  }

  // All but the blocks of one request go dim, and lines go through its tables in their order.
  drawFollowed(context) {
    const { number, tables } = this.following;
    context.fillStyle = isDark ? "rgb(11 14 21 / 0.38)" : "rgb(246 247 250 / 0.45)";
    context.fillRect(0, 0, this.above.width, this.above.height);
    this.followed = new Set();
    for (const { ids, isHost } of tables) if (!isHost) for (const id of ids) if (id) this.followed.add(id);
    const side = this.size - this.gap;
    for (const block of this.followed) {
      if (block > this.shown) continue;
      const [x, y] = this.middle(block), cell = this.cells[block];
      context.fillStyle = css(colourOf(kindOf(cell) === HELD ? ownerOf(cell) : number, Math.max(1, countOf(cell))));
      context.fillRect(x - side / 2, y - side / 2, side, side);
    }
    let segments = 0;
    const lines = tables.filter((table) => !table.isHost);
    lines.forEach(({ ids, group }, line) => {
      const held = ids.filter((id) => id > 0 && id <= this.shown);
      if (!held.length) return;
      const shift = lines.length > 1 ? ((line % 8) / 7 - 0.5) * Math.min(side * 0.5, 12) : 0;
      const hue = (hueOf(number) + (line % 8) * 9) % 360;
      context.strokeStyle = `hsl(${hue} 95% ${isDark ? 82 : 30}% / ${lines.length > 2 ? 0.38 : 0.9})`;
      context.lineWidth = Math.max(1, Math.min((lines.length > 2 ? 1.3 : 2.5) * this.scale, this.size * 0.1));
      context.setLineDash(group ? [this.size * 0.4, this.size * 0.25] : []);
      context.lineJoin = "round";
      context.beginPath();
      held.forEach((id, i) => {
        if (segments++ > MOST_SEGMENTS) return;
        const [x, y] = this.middle(id);
        if (i) context.lineTo(x + shift, y + shift); else context.moveTo(x + shift, y + shift);
      });
      context.stroke();
      context.setLineDash([]);
      const [x, y] = this.middle(held[0]), [toX, toY] = this.middle(held[held.length - 1]);
      context.fillStyle = context.strokeStyle;
      const radius = Math.max(2 * this.scale, Math.min(this.size * 0.2, 6 * this.scale));
      context.beginPath(); context.arc(x + shift, y + shift, radius, 0, 7); context.fill();
      this.outline(context, held[held.length - 1], context.strokeStyle, Math.max(1.5, this.scale));
      context.beginPath(); context.arc(toX + shift, toY + shift, radius * 0.5, 0, 7); context.fill();
    });
  }

  outline(context, block, colour, width) {
    if (block > this.shown) return;
    const [x, y] = this.middle(block), half = (this.size - this.gap) / 2 + 1;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(x - half, y - half, 2 * half, 2 * half);
  }
}
