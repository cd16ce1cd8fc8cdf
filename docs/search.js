// Included by Sphinx at the head of its search (html_search_scorer).
var Scorer = {
  // The appendix has every word: its sections come after the pages that explain the thing.
  score: ([page, title, anchor, text, score]) => (page === "appendix" ? score / 10 : score),
  // Sphinx's own weights
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};

// A page of a folder cannot read the others, from which the excerpts are taken; it can load them as a script (conf.py).
if (location.protocol === "file:") {
  const loaded = new Promise((done) => {
    const script = document.createElement("script");
    script.src = "_static/pages.js";
    script.onload = done;
    document.head.append(script);
  });
  window.fetch = (address) => loaded.then(() => ({ text: () => PAGES[address.replace(/^(\.\/)+/, "")] }));
}
