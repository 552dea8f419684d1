// What colour a block has: the hue is its request's, the strength how many tables hold it.

import { ASIDE, CACHED, FREE, HELD, PINNED, RESERVED, countOf, kindOf, ownerOf } from "./wire.js";

export let isDark = true;

const QUIET = {
  true: { [FREE]: [27, 33, 46], [CACHED]: [58, 72, 102], [PINNED]: [214, 168, 66], [ASIDE]: [38, 42, 51], [RESERVED]: [72, 62, 52] },
  false: { [FREE]: [228, 232, 239], [CACHED]: [183, 197, 222], [PINNED]: [196, 146, 34], [ASIDE]: [214, 217, 223], [RESERVED]: [214, 203, 188] },
};

export function setDark(dark) {
  isDark = dark;
  seen.clear();
}

export const hueOf = (number) => (number * 137.508 + 205) % 360;

// From one table to eight and more: dimmer to brighter on a dark page, paler to stronger on a light one.
export function strengthOf(count) {
  return Math.min(1, Math.log2(Math.max(1, count)) / 3);
}

export function colourOf(number, count = 1) {
  const strength = strengthOf(count);
  const lightness = isDark ? 42 + 36 * strength : 66 - 30 * strength;
  const saturation = isDark ? 58 + 32 * strength : 52 + 30 * strength;
  return rgb(hueOf(number), saturation / 100, lightness / 100);
}

export const css = ([red, green, blue], alpha = 1) => `rgb(${red} ${green} ${blue} / ${alpha})`;

const seen = new Map();

// A cell as a pixel, alpha first: what ImageData has on a little-endian machine.
export function pixelOf(cell) {
  let pixel = seen.get(cell);
  if (pixel === undefined) {
    const kind = kindOf(cell);
    const [red, green, blue] = kind === HELD ? colourOf(ownerOf(cell), countOf(cell)) : QUIET[isDark][kind];
    pixel = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    if (seen.size > 20000) seen.clear();
    seen.set(cell, pixel);
  }
  return pixel;
}

export const quiet = (kind) => css(QUIET[isDark][kind]);

function rgb(hue, saturation, lightness) {
  const part = saturation * Math.min(lightness, 1 - lightness);
  const at = (shift) => {
    const k = (shift + hue / 30) % 12;
    return Math.round(255 * (lightness - part * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [at(0), at(8), at(4)];
}
