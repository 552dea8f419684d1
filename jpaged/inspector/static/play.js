// Sends requests of one's own, and makes the pool smaller.

import { events } from "./wire.js";
import { colourOf, css } from "./colours.js";
import { text } from "./view.js";

const $ = (id) => document.getElementById(id);
const MOST_ANSWERS = 12, MOST_SHOWN = 1500;
const STORY = "Once upon a time there was a small dragon who lived in a cave by the sea. Every morning the dragon";

// What there is to see, each a click: values of the sliders, a pool, how the prompts of several differ.
const SCENES = [
  ["share", "eight samples share the blocks of one prompt and copy a block when they write to it", { n: 8, tokens: 400, temperature: 1, blocks: 256, prompt: STORY }],
  ["beams", "beams fork and finish at every step", { beams: 6, tokens: 200, temperature: 0, blocks: 128, prompt: STORY }],
  ["prefix", "prompts with a common prefix reuse the first one's blocks", { requests: 8, tokens: 400, temperature: 0.8, blocks: 256, prompt: STORY, isAlike: true }],
  ["preempt", "more requests than the pool holds: some are preempted and resume later", { requests: 12, tokens: 600, temperature: 0.9, blocks: 128, prompt: STORY }],
];

export class Play {
  // `token` says which key to send, `owner` finds the number of a request by its id.
  constructor(about, owner) {
    this.about = about;
    this.owner = owner;
    this.running = new Set();
    this.numSent = 0;
    this.isAlike = false;
    this.changedAt = Date.now();
    this.controller = new AbortController();
    const saved = sessionStorage.getItem("jpaged-key");
    if (saved) $("token").value = saved;
    $("token").addEventListener("change", () => sessionStorage.setItem("jpaged-key", $("token").value));
    $("tokens").max = Math.max(16, Math.min(800, Math.floor((about.max_model_len * 0.75) / 8) * 8));
    for (const id of ["n", "beams", "temperature", "tokens", "requests"]) {
      $(id).addEventListener("input", () => this.tell(id));
      this.tell(id);
    }
    $("prompt").addEventListener("input", () => { this.isAlike = false; });
    $("play").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      $("play").requestSubmit();
    });
    // The limit of the pool is this tab's: it is renewed while the tab lives, and ends with it.
    this.limited = null;
    setInterval(() => { if (this.limited !== null) this.limit(this.limited, true); }, 5000);
    addEventListener("pagehide", () => { if (this.limited !== null) this.ask(null, true); });
    $("stop").addEventListener("click", () => this.stop());
    for (const [name, title, values] of SCENES) {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = name; button.title = title; button.dataset.scene = name;
      button.addEventListener("click", () => this.perform(values));
      $("scenes").append(button);
    }
  }

  headers() {
    const token = $("token").value;
    return token ? { Authorization: `Bearer ${token}` } : {};
  }

  tell(id) {
    const value = Number($(id).value);
    if (id === "beams" && value > 1) { $("n").value = 1; this.tell("n"); }
    if (id === "n" && value > 1 && Number($("beams").value) > 1) { $("beams").value = 1; this.tell("beams"); }
    text(`o-${id}`, id === "beams" && value === 1 ? "off" : id === "temperature" ? value.toFixed(1) : value);
  }

  stop() {
    this.controller.abort();
    this.controller = new AbortController();
  }

  // A scene begins when the one before has left the pool.
  async perform(values) {
    this.stop();
    for (const [id, value] of Object.entries({ n: 1, beams: 1, requests: 1, ...values })) {
      if (id === "prompt") $("prompt").value = value;
      else if ($(id)?.type === "range") { $(id).value = value; this.tell(id); }
    }
    this.isAlike = Boolean(values.isAlike);
    if (values.blocks && this.about.can_limit && this.numBlocks > values.blocks) {
      for (let tries = 0; tries < 10 && !(await this.limit(values.blocks)); tries++) {
        await new Promise((resolve) => setTimeout(resolve, 150));
      }
    }
    const problem = $("problem").textContent;
    this.send(true);
    text("problem", problem);
  }

  // All requests of a click are one call: browsers allow six connections, and further ones would wait.
  async send(isScene = false) {
    const number = Number($("requests").value), beams = Number($("beams").value);
    const id = `page-${Date.now().toString(36)}-${++this.numSent}`;
    const prompt = $("prompt").value || "Once";
    // Prompts that begin alike share blocks; those that begin otherwise share none.
    const prompts = Array.from({ length: number }, (_, place) => {
      const mark = number > 1 ? `${["red", "old", "wise", "shy", "loud", "tiny", "proud", "lazy"][place % 8]} ${place}` : "";
      return !mark ? prompt : this.isAlike ? `${prompt} ${mark}` : `${mark}: ${prompt}`;
    });
    const body = {
      model: this.about.model,
      max_tokens: Number($("tokens").value),
      stream: true,
      n: beams > 1 ? 1 : Number($("n").value),
      temperature: beams > 1 ? 0 : Number($("temperature").value),
      ignore_eos: isScene || !this.about.has_chat,
    };
    if (beams > 1) body.beam_width = beams;
    text("problem", "");
    const answers = new Answers(id, () => this.owner(id));
    this.running.add(id);
    try {
      const isChat = this.about.has_chat && number === 1;
      if (isChat) body.messages = [{ role: "user", content: prompt }];
      else body.prompt = this.about.has_chat ? await Promise.all(prompts.map((one) => this.chatIds(one))) : prompts;
      const answer = await this.post(isChat ? "v1/chat/completions" : "v1/completions", body, { "X-Request-Id": id });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for await (const data of events(reader)) {
        if (data === "[DONE]") break;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        for (const choice of event.choices ?? []) {
          answers.add(choice.index, choice.text ?? (choice.delta?.reasoning_content ?? "") + (choice.delta?.content ?? ""));
        }
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      answers.fail(String(error.message ?? error));
      text("problem", error.message ?? error);
      if (/key|token|authen/i.test(error.message ?? "")) $("key").open = true;
    } finally {
      this.running.delete(id);
    }
  }

  async post(path, body, headers = {}) {
    const answer = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers, ...this.headers() },
      body: JSON.stringify(body),
      signal: this.controller.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error?.message ?? answer.statusText);
    return answer;
  }

  // The tokens of a prompt as the model's chats have it.
  async chatIds(prompt) {
    const answer = await this.post("tokenize", { model: this.about.model, messages: [{ role: "user", content: prompt }] });
    return (await answer.json()).tokens;
  }

  // Offers sizes that the pool can have.
  offer(numBlocks, limit) {
    if (this.numBlocks !== numBlocks) {
      this.numBlocks = numBlocks;
      const sizes = [32, 48, 64, 128, 256, 1024, 4096].filter((size) => size < numBlocks);
      $("presets").replaceChildren(...[...sizes, null].map((size) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = size ?? `all ${numBlocks}`;
        button.dataset.blocks = size ?? "all";
        button.disabled = !this.about.can_limit;
        button.addEventListener("click", () => this.limit(size));
        return button;
      }));
    }
    // Another tab has set another limit: that one holds.
    if (this.limited !== null && limit !== this.limited && Date.now() - this.changedAt > 3000) this.limited = null;
    for (const button of $("presets").children) {
      const is = button.dataset.blocks === "all" ? limit === numBlocks : Number(button.dataset.blocks) === limit;
      button.setAttribute("aria-pressed", String(is));
    }
  }

  ask(blocks, keepalive = false) {
    return fetch("page/limit", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify({ blocks }),
      keepalive,
    });
  }

  // True where the pool has that size now.
  async limit(blocks, isAgain = false) {
    if (!isAgain) text("problem", "");
    this.limited = blocks;
    try {
      const answer = await this.ask(blocks);
      const told = await answer.json();
      if (!answer.ok) throw new Error(told.error?.message ?? answer.statusText);
      if (told.blocks_in_use && !isAgain) text("problem", `${told.blocks_in_use} blocks above the limit are still in use and are released when their requests finish`);
      this.changedAt = Date.now();
      return true;
    } catch (error) {
      this.limited = null;
      text("problem", error.message ?? error);
      if (/key|token|authen/i.test(error.message ?? "")) $("key").open = true;
      return false;
    }
  }
}

// The texts of one request, one paragraph for each sample, in the colour of its blocks.
class Answers {
  constructor(id, owner) {
    this.owner = owner;
    this.shown = new Map();
  }

  at(index) {
    let shown = this.shown.get(index);
    if (!shown) {
      shown = document.createElement("p");
      this.shown.set(index, shown);
      $("answers-card").hidden = false;
      $("answers").prepend(shown);
      while ($("answers").children.length > MOST_ANSWERS) $("answers").lastChild.remove();
    }
    const number = this.owner();
    if (number !== null) shown.style.borderColor = css(colourOf(number, 2));
    return shown;
  }

  add(index, words) {
    const shown = this.at(index);
    if (shown.textContent.length < MOST_SHOWN) shown.append(words);
  }

  fail(problem) {
    const shown = this.at(-1);
    shown.className = "bad";
    shown.textContent = problem;
  }
}
