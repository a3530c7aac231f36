"""The web dashboard of runs: a server that reads run folders, and a page that shows them."""
