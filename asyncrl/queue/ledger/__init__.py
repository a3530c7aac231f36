"""The ledger of one stream: a pure state machine. Commands are checked, become events, and events change the state."""
