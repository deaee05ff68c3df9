module efa-finetune/tests/gotools/pause

go 1.25.0
