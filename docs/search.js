// Search for names as they are pasted: the search would read the dashes of `--flag` as "without", and the colon of
// `vllm:metric` as the name of a field. A Python name also finds the flag: `max_model_len` finds `--max-model-len`.
const query = document.querySelector("[data-md-component=search-query]");
const { get, set } = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
Object.defineProperty(query, "value", {
  get() {
    return get
      .call(this)
      .replace(/(^|\s)[-+]+(?=\w)/g, "$1")
      .replace(/:/g, " ")
      .replace(/\w+_\w+/g, (name) => `${name} ${name.replaceAll("_", "-")}`);
  },
  set(value) {
    set.call(this, value);
  },
});
